"""Stage rollouts: an agent attempts each task several times with a policy; every model call is recorded."""

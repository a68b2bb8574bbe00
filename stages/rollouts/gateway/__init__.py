"""The model gateway: agents that speak a model API over HTTP reach the policy through it."""

"""Tells of which chat templates a message's text depends on nothing that comes after it.

Such a template renders what is new of a conversation without what was said before: the text of the first message and
of the new ones, less that of the first. Only what is known to be harmless is let through; of every other template the
whole conversation is rendered each time.
"""

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_HARMLESS = (
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Const, nodes.CondExpr,
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Concat, nodes.Add, nodes.Getattr, nodes.Getitem,
    nodes.Filter, nodes.Test, nodes.Tuple, nodes.List,
)  # fmt: skip
_FILTERS = frozenset({"trim", "tojson", "string", "upper", "lower", "default", "length", "join", "safe"})
_ALL, _LOOP, _PROMPT = "messages", "loop", "add_generation_prompt"


def is_append_only(source: str) -> bool:
    """Whether what more messages add to a rendered conversation depends on them and on its first message only."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        body = environment.parse(source).body
    except TemplateSyntaxError:
        return False
    loops = [node for node in body if isinstance(node, nodes.For)]
    if len(loops) != 1 or not _goes_over_messages(loops[0]):
        return False
    place = body.index(loops[0])
    return (
        all(_is_harmless(node, {_LOOP, _PROMPT}) for node in body[:place])
        and all(_is_harmless(node, {_PROMPT}) for node in loops[0].body)
        and all(_is_harmless(node, {_LOOP}) for node in body[place + 1 :])
    )


def _goes_over_messages(loop: nodes.For) -> bool:
    return (
        isinstance(loop.target, nodes.Name)
        and isinstance(loop.iter, nodes.Name)
        and loop.iter.name == _ALL
        and loop.test is None
        and not loop.else_
        and not loop.recursive
    )


def _is_harmless(node: nodes.Node, forbidden: set[str]) -> bool:
    if not isinstance(node, _HARMLESS):
        return False
    if isinstance(node, nodes.Getitem) and _is_named(node.node, _ALL):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0 and type(node.arg.value) is int
    if isinstance(node, nodes.Getattr) and _is_named(node.node, _LOOP):
        return node.attr == "first" and _LOOP not in forbidden
    if isinstance(node, nodes.Name):  # of these, only what is let through above
        is_special = node.name in (_ALL, _LOOP) or (node.ctx == "store" and node.name == _PROMPT)
        return not is_special and node.name not in forbidden
    if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
        return False
    return all(_is_harmless(child, forbidden) for child in node.iter_child_nodes())


def _is_named(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name

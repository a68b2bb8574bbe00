"""How values are written for a person."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def cell(value: Any) -> "Text":
    """A value in a table of rich's, as it stands: no bracket or colon in it is taken for markup."""
    from rich.text import Text

    return Text(value if isinstance(value, str) else shown(value))


def shown(value: Any) -> str:
    """A value as a person reads it; ``-`` where it is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    return str(value)

"""One sample as a page: each token with what generator and trainer said of it. It needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.page.safe_text import safe

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; background: #8881; padding: 1rem; border-radius: 6px; }}
pre span {{ border-radius: 2px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #8884; }}
td:nth-child(2), th:nth-child(2) {{ text-align: left; font-family: monospace; white-space: pre; }}
</style><h1>{title}</h1><p>{facts}</p>
<p>Red: the trainer finds the token less likely than the generator that drew it; blue: more likely. Point at a
token for its numbers.</p>
"""
_COLUMNS = (
    "place", "text", "version", "logprob", "trainer_logprob", "ratio", "advantage", "reference_logprob",
)  # fmt: skip
_STRONGEST = 0.5  # nats that make a token's colour as strong as it gets


def token_page(title: str, facts: str, prompt: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of a sample."""
    marked = "".join(_marked(row) for row in rows)
    names = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    head = "".join(f"<th>{safe(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row[name])}</td>' for name in names)}</tr>" for row in rows)
    return (
        _HEAD.format(title=safe(title), facts=safe(facts))
        + f"<h2>Prompt</h2><pre>{safe(prompt)}</pre><h2>Answer</h2><pre>{marked}</pre>"
        + f"<h2>Tokens</h2><table><tr>{head}</tr>{body}</table></html>\n"
    )


def _marked(row: dict[str, Any]) -> str:
    apart = row["trainer_logprob"] - row["logprob"]
    strength = min(1.0, abs(apart) / _STRONGEST) * 0.8
    colour = f"rgba({'220,40,40' if apart < 0 else '40,90,220'},{strength:.2f})"
    said = "; ".join(
        f"{name} {_cell(row[name])}" for name in _COLUMNS if row[name] is not None and name != "text"
    )
    return f'<span style="background:{colour}" title="{said}">{safe(row["text"])}</span>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else safe(str(value))

"""Samples as one self-contained HTML page: no other file, nothing fetched, every text escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mm_models.cli.view_data import visible

if TYPE_CHECKING:
    from mm_models.cli.view_data import Picture, View

THUMBNAIL = 320
"""Longest side of a picture on the page, in pixels."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace; background: #f6f6f4; padding: 1rem; }
mark { background: #c9ecc9; color: inherit; }
.repeat { color: #777; }
figure { margin: .5rem 0; }
figure img { display: block; border: 1px solid #ccc; image-rendering: auto; }
figcaption, .facts { color: #555; }
.wrong { color: #b00020; }
"""


def page(views: Sequence[View]) -> str:
    """The whole page."""
    title = html.escape(", ".join(view.title for view in views))
    body = "\n".join(map(_section, views))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<p>Trained tokens are <mark>marked</mark>.</p>\n{body}\n</body>\n</html>\n"
    )


def _section(view: View) -> str:
    kind = "facts" if view.outcome.sample is not None else "facts wrong"
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in view.facts())
    pictures = iter(view.pictures)
    parts = []
    for run in view.runs:
        if run.image:
            parts.append(_figure(next(pictures)))
        elif run.repeat:
            parts.append(f'<span class="repeat">{html.escape(visible(run.text))} x {run.count}</span>')
        else:
            text = html.escape(visible(run.text, keep="\n\t"))
            parts.append(f"<mark>{text}</mark>" if run.trained else text)
    text = f"<pre>{''.join(parts)}</pre>" if parts else ""
    return f'<h2>{html.escape(view.title)}</h2>\n<ul class="{kind}">{facts}</ul>\n{text}'


def _figure(picture: Picture) -> str:
    from mm_models.data.images import load_rgb

    image = load_rgb(picture.source)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    data = base64.b64encode(file.getvalue()).decode()
    caption = html.escape(picture.line())
    return (
        f'</pre><figure><img alt="" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure><pre>'
    )

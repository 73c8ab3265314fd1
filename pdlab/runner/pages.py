"""An executed notebook as one HTML file: light and dark, narrow and wide, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

from pdlab.runner.notebook import VALUES, import_nbformat, tags
from pdlab.runner.process import EXIT_CODES, Result

CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --link: #0a58ca; --good: #116329; --warn: #7d4e00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --bg: #0f1318; --fg: #e3e8ee; --soft: #9aa5b1; --line: #333c47;
  --card: #181e26; --link: #79b8ff; --good: #6fdd8b; --warn: #e3b341; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem; max-width: 62rem; background: var(--bg); color: var(--fg);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: break-word; }
a { color: var(--link); } h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .87em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.soft { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92em; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.badge { display: inline-block; padding: 0 .5em; border: 1px solid currentColor; border-radius: 1em; font-size: .85em;
  white-space: nowrap; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
img, svg { max-width: 100%; height: auto; }
"""

NOTEBOOK_CSS = """
.cell { margin: .9rem 0; } .prompt, .anchor-link { display: none; }
.input_area { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.output_area { margin-top: .5rem; } .output_subarea { overflow-x: auto; }
.output_png img, .output_jpeg img, .output_svg svg { background: #fff; border-radius: 6px; padding: .25rem; }
.output_stderr, .output_error { border-left: 3px solid var(--warn); padding-left: .6rem; }
.output_error { border-color: var(--bad); }
.text_cell_render pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.rendered_html table { display: block; overflow-x: auto; border: 0; } /* pandas writes border="1" */
.rendered_html :is(th, td) { border: 0; border-bottom: 1px solid var(--line); }
.dataframe :is(td, thead th) { text-align: right; }
.banner { border: 1px solid currentColor; border-radius: 6px; padding: .6rem .8rem; }
.ansi-red-fg, .ansi-red-intense-fg { color: var(--bad); } .ansi-green-fg, .ansi-green-intense-fg { color: var(--good); }
.ansi-yellow-fg, .ansi-yellow-intense-fg { color: var(--warn); } .ansi-blue-fg, .ansi-blue-intense-fg { color: var(--link); }
.ansi-cyan-fg, .ansi-cyan-intense-fg, .ansi-magenta-fg { color: var(--soft); } .ansi-bold { font-weight: 600; }
"""


def page(title: str, body: str, css: str = "") -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}{css}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def write(out: Path, result: Result) -> Path | None:
    """The page of a job's notebook, beside it; None where there is no notebook, or it cannot be shown or written."""
    if not result.output:
        return None
    source = out / result.output
    target = source.with_suffix(".html")
    try:
        target.write_text(render(source.read_text(encoding="utf-8"), result), encoding="utf-8")
    except Exception as error:  # half a notebook, a full disk, or whatever nbconvert makes of an odd output
        logging.getLogger(__name__).warning("no page for %s: %s: %s", result.output, type(error).__name__, error)
        target.unlink(missing_ok=True)
        return None
    return target


def render(content: str, result: Result) -> str:
    nbformat = import_nbformat()
    from nbconvert import HTMLExporter

    nb = _for_paper(nbformat.reads(content, as_version=4))
    logging.getLogger("traitlets").setLevel(logging.ERROR)  # nbconvert's remarks about missing alternative texts
    body, _ = HTMLExporter(template_name="basic").from_notebook_node(nb)
    # links to other notebooks lead to their place in the report; a page may be read before theirs exists
    body = re.sub(r'href="(?:\.\./)?(?:\w+/)?(\w+)\.ipynb(?:#[^"]*)?"', r'href="index.html#\1"', body)
    body = re.sub(r'<a href="\.\./docs/[^"]*">(.*?)</a>', r"\1", body)  # a report may lie anywhere, also far from docs/
    stem = Path(result.notebook).stem
    settings = " · ".join(f"{name}={value}" for name, value in result.params.items())
    head = f'<p class="soft"><a href="index.html">Report</a> · {html.escape(stem)} · {result.seconds:.0f} s'
    head += f" · {html.escape(settings)}</p>" if settings else "</p>"
    if EXIT_CODES[result.status]:
        head += f'<p class="banner bad"><a href="#error">{result.status}</a>: {html.escape(result.error or "")}</p>'
        body = body.replace('output_error">', 'output_error" id="error">', 1)
    return page(stem, head + body, NOTEBOOK_CSS + _highlighting())


def _for_paper(nb: Any) -> Any:
    """Leaves out what a page without a network or a kernel cannot show, and what it says better itself.

    A widget needs its library; its static twin is in the same cell's output. A badge is an image from elsewhere. The marks
    that papermill sets beside an error are the banner's concern.
    """
    nb.cells = [cell for cell in nb.cells if "papermill-error-cell-tag" not in tags(cell)]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = _REMOTE_IMAGE.sub(r"\1", cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(VALUES, None) is not None:
                data.setdefault("text/plain", "")
            if data.pop("application/vnd.jupyter.widget-view+json", None) is not None:
                data.clear()
                data["text/html"] = '<p class="soft">An interactive control is here when the notebook is open in Jupyter.</p>'
    return nb


_REMOTE_IMAGE = re.compile(r"!\[([^\]]*)\]\(https?://[^)]*\)")


@cache
def _highlighting() -> str:
    from pygments.formatters import HtmlFormatter

    styles = (HtmlFormatter(style=name, nobackground=True) for name in ("default", "monokai"))
    light, dark = (style.get_style_defs(".highlight") for style in styles)
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"

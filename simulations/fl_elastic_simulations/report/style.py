"""The style sheet of the page: light and dark, from a phone to a wide screen."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f4f6f8; --surface: #ffffff; --ink: #1a2129; --muted: #586473;
  --line: #dfe4ea; --empty: #eef1f4; --shadow: rgba(20, 30, 45, 0.16);
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0f1317; --surface: #171b21; --ink: #e4e8ed; --muted: #9aa6b4;
    --line: #2c343d; --empty: #222932; --shadow: rgba(0, 0, 0, 0.6);
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere;
}
main, footer { max-width: 1200px; margin: 0 auto; padding: 0 24px; }
header { margin: 40px 0 28px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 12px; letter-spacing: -0.015em; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 4px; }
header p { max-width: 72ch; margin: 0; color: var(--muted); }
header strong { color: var(--ink); }
section {
  background: var(--surface); border: 1px solid var(--line); border-radius: 14px;
  padding: 22px 24px; margin: 0 0 20px; min-width: 0; display: flex; flex-direction: column;
}
.guide { margin: 0 0 14px; color: var(--muted); font-size: 0.92rem; max-width: 84ch; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 20px; }
.pair .plot { margin-top: auto; }
/* The cover moves with the table, the shadow does not: it shows where columns are hidden. */
.scroll {
  overflow-x: auto; margin: 10px -8px 8px;
  background:
    linear-gradient(to left, var(--surface) 40%, transparent) right / 48px 100% no-repeat local,
    linear-gradient(to left, var(--shadow), transparent) right / 14px 100% no-repeat scroll,
    var(--surface);
}
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 12px; text-align: right; white-space: nowrap; }
thead th {
  white-space: normal; vertical-align: bottom; overflow-wrap: normal; color: var(--muted);
  font-size: 0.84rem; font-weight: 600; line-height: 1.3; border-bottom: 1px solid var(--line);
}
tbody tr + tr > * { border-top: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--surface); }
tbody th { font-weight: 600; max-width: 16em; overflow: hidden; text-overflow: ellipsis; }
.dot {
  display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.55em;
  background: var(--method); border: 2px solid var(--method); flex: none;
}
.dash {
  border: 0; border-radius: 0; width: 1.5em; height: 0.35em; vertical-align: 0.2em;
  background: repeating-linear-gradient(to right, var(--method) 0 0.4em, transparent 0 0.55em);
}
.note { margin: 8px 0 0; color: var(--muted); font-size: 0.92rem; }
.plot { width: 100%; min-width: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 0 10px; padding: 0; border: 0; }
.chips button, .chips label {
  font: inherit; font-size: 0.9rem; line-height: 1.2; color: var(--ink); background: transparent;
  border: 1px solid var(--line); border-radius: 999px; padding: 6px 13px 6px 10px; cursor: pointer;
  max-width: 100%; text-align: left; display: inline-flex; align-items: baseline;
}
.chips button:hover, .chips label:hover { border-color: var(--method); }
.chips button[aria-pressed="false"] { color: var(--muted); text-decoration: line-through; }
.chips button[aria-pressed="false"] .dot:not(.dash) { background: transparent; }
.chips input { position: absolute; opacity: 0; pointer-events: none; }
.chips label { position: relative; }
.chips label:not(:has(:checked)) { color: var(--muted); }
.chips label:not(:has(:checked)) .dot:not(.dash) { background: transparent; }
.chips label:has(:checked) { border-color: var(--method); box-shadow: 0 0 0 1px var(--method); }
.chips label:has(:focus-visible), .chips button:focus-visible, .scroll:focus-visible {
  outline: 2px solid var(--method, var(--muted)); outline-offset: 2px;
}
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.scale {
  display: flex; align-items: center; gap: 10px; margin: 0 0 14px;
  color: var(--muted); font-size: 0.85rem;
}
.scale i {
  width: 140px; height: 10px; border-radius: 5px; flex: none;
  background: linear-gradient(to right, var(--empty), var(--method));
}
.panels { display: grid; gap: 18px 22px; grid-template-columns: repeat(3, minmax(0, 1fr)); }
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figure .plot { margin-top: auto; }
figcaption { font-weight: 600; font-size: 0.95rem; line-height: 1.35; margin-bottom: 4px; }
figcaption small { display: block; color: var(--muted); font-weight: 400; font-size: 0.84rem; }
footer { padding-bottom: 48px; color: var(--muted); font-size: 0.88rem; }
dl { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 6px 0 0; }
dl div { display: flex; gap: 0.5em; }
dt { font-weight: 600; white-space: nowrap; }
dd { margin: 0; }
@media (max-width: 1000px) {
  .pair { grid-template-columns: minmax(0, 1fr); }
  .panels { grid-template-columns: repeat(2, minmax(0, 1fr)); }
}
@media (max-width: 640px) {
  main, footer { padding: 0 12px; }
  header { margin: 26px 4px 20px; }
  h1 { font-size: 1.55rem; }
  section { padding: 16px 14px; border-radius: 12px; margin-bottom: 14px; }
  .panels { grid-template-columns: minmax(0, 1fr); }
  table { font-size: 0.93rem; }
  th, td { padding: 8px 9px; }
  tbody th { max-width: 9em; }
  .legend { order: 1; margin: 10px 0 0; }
  footer { padding-bottom: 32px; }
}
"""
"""Custom properties carry the colours, so that the script can read those in force."""

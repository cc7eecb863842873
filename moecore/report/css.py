"""The style sheet of the report: system fonts, two colour schemes, tables that scroll by themselves with a fixed first column."""

CSS = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --text: #1c2733; --quiet: #5b6672; --line: #dfe3e7; --accent: #0a64a4;
  --best: #e6f1f9; --holds: #0a6b4f; --against: #b04a00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --card: #1b2027; --text: #e4e8ec; --quiet: #9aa6b2; --line: #313943; --accent: #6db8ee; --best: #17364c;
    --holds: #5fcfa8; --against: #f0a05a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .4rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
h4 { font-size: .88rem; font-weight: 600; margin: 1.3rem 0 .3rem; }
h4 + .scroll { margin-top: .3rem; }
p { margin: .3rem 0 .9rem; max-width: 68ch; }
.quiet, figcaption, .limits { color: var(--quiet); }
.quiet { font-size: .9rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .9rem; margin-top: .8rem; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: .8rem 0;
  -webkit-overflow-scrolling: touch; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .8rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { font-weight: 600; font-size: .82rem; color: var(--quiet); vertical-align: bottom; min-width: 6.2rem; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); font-weight: 600; border-right: 1px solid var(--line);
  max-width: 15rem; z-index: 1; }
.limits { display: block; font-size: .76rem; white-space: nowrap; }
.note { display: block; font-size: .76rem; font-weight: 400; color: var(--quiet); max-width: 34ch; }
.best { background: var(--best); font-weight: 650; }
.best .limits { font-weight: 400; }
.dense th, .dense td { padding: .3rem .8rem; line-height: 1.35; }
.words { text-align: left; }
.paper > * { color: var(--quiet); font-style: italic; border-bottom-style: dotted; }
tr:not(.paper) + .paper > * { border-top: 2px solid var(--line); }
.paper .note { font-style: normal; max-width: 30ch; min-width: 24ch; }
details th .note { min-width: 24ch; }
.group > * { padding-top: 1.1rem; color: var(--accent); }
.group th { white-space: nowrap; max-width: 0; border-right: 0; }
.simulated { background: var(--against); color: var(--page); padding: .6rem .9rem; border-radius: 8px; max-width: none; }
.verdict { font-weight: 650; white-space: nowrap; }
.holds { color: var(--holds); }
.contradicted { color: var(--against); }
.open { color: var(--quiet); font-weight: 500; }
.key { display: inline-block; padding: 0 .4rem; border-radius: 3px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem; align-items: start; }
figure { margin: 0; padding: .9rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; min-width: 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; color: var(--quiet); }
.wide svg { min-width: 44rem; }
details > figure { margin: .8rem 0; max-width: 60rem; }
figure img { display: block; width: 100%; min-width: 23rem; height: auto; }
figcaption { font-size: .82rem; margin-top: .5rem; }
details { margin: .9rem 0; }
summary { cursor: pointer; font-weight: 600; color: var(--accent); padding: .2rem 0; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem;
  font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
@media (max-width: 600px) { main { padding: 1.3rem .9rem 3rem; } h1 { font-size: 1.4rem; } th:first-child { min-width: 7.8rem; max-width: 8.5rem;
  overflow-wrap: anywhere; } th, td { padding: .45rem .6rem; } }
"""

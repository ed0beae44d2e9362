"""The page's style: one column that fits a phone, light or dark as the reader's system is."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de;
  --soft: #f3f5f7; --fits: #0a6b3d; --tight: #8a5a00; --oom: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #14181c; --line: #3a424a;
  --soft: #1f252b; --fits: #5fd39a; --tight: #f0b849; --oom: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.verdict { font-size: 1.25rem; font-weight: 600; }
.verdict.fits, tr.fits td:nth-child(3) { color: var(--fits); }
tr.tight td:nth-child(3) { color: var(--tight); }
.verdict.oom, tr.oom td:nth-child(3) { color: var(--oom); }
.frame { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid var(--line); background: var(--soft); font-weight: 600; }
tr.total td { border-top: 1px solid var(--line); font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); }
svg .card { stroke: var(--oom); stroke-dasharray: 5 4; }
svg .part:hover, svg .dot:hover { opacity: .65; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem;
  border-radius: .15rem; vertical-align: -.05rem; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .15rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
li { overflow-wrap: anywhere; }
"""

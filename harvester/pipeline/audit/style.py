"""The style of the audit's page: light and dark, by what the reader's system says."""

from __future__ import annotations

STYLE = """
:root { --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e3e7ed; --good: #157f4c; --bad: #c22f3d;
  --odd: #a86400; --a: #2f6fde; --b: #12a594; --c: #e5892f; --d: #c22f3d; --shade: 0 1px 3px rgb(16 24 40 / 8%); }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #93a0b4;
  --line: #2c3541; --good: #4cc38a; --bad: #ff7b84; --odd: #f0b35a; --a: #7aa7ff; --b: #4fd1c1; --c: #f0a45d;
  --d: #ff7b84; --shade: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 18px 60px; }
header, section { background: var(--card); border-radius: 12px; padding: 20px 24px; margin: 0 0 18px;
  box-shadow: var(--shade); }
header { border-left: 8px solid var(--good); }
header.broken { border-color: var(--bad); }
header.suspect { border-color: var(--odd); }
h1 { font-size: 26px; line-height: 1.25; margin: 4px 0 8px; }
h2 { font-size: 18px; margin: 0 0 8px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 4px 0 10px; }
.quiet, .legend { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; background: none;
  padding: 0; box-shadow: none; }
.tile { background: var(--card); border-radius: 10px; padding: 12px 14px; box-shadow: var(--shade); }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; color: var(--ink); }
.tile span { color: var(--soft); font-size: 13px; }
.tile.holds b { color: var(--good); } .tile.broken b { color: var(--bad); } .tile.suspect b { color: var(--odd); }
.tile.broken { outline: 2px solid var(--bad); }
i { font-style: normal; font-size: 12px; border-radius: 9px; padding: 2px 9px; border: 1px solid; margin-right: 4px; }
i.broken { color: var(--bad); } i.suspect { color: var(--odd); }
.limits { border-left: 8px solid var(--odd); }
.limits ul { margin: 0; padding-left: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
.numbers td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; margin: 6px 0; }
svg text { fill: var(--soft); font-size: 11.5px; }
svg .scale, svg .name { text-anchor: end; } svg .tick { text-anchor: middle; } svg .name { fill: var(--ink); }
svg .rule { stroke: var(--line); } svg .mark { stroke: var(--bad); stroke-dasharray: 5 4; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .bar { fill: var(--a); opacity: 0.85; } svg .bar:hover { opacity: 1; }
svg .p50 { stroke: var(--a); } svg .p90 { stroke: var(--b); } svg .p99 { stroke: var(--c); }
svg .max { stroke: var(--d); }
svg circle.p50 { fill: var(--a); } svg circle.p90 { fill: var(--b); } svg circle.p99 { fill: var(--c); }
svg circle.max { fill: var(--d); }
.legend span { margin-right: 18px; font-size: 13px; }
.legend span::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  vertical-align: middle; background: currentcolor; }
.legend .p50 { color: var(--a); } .legend .p90 { color: var(--b); } .legend .p99 { color: var(--c); }
.legend .max { color: var(--d); }
"""

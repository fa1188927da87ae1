"""CSS and JavaScript of a report, embedded in the page, so that it opens from a file and without a network."""

CSS = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #fff; --line: #e4e3de; --ink: #1b1d22; --soft: #676a73; --good: #16834f; --bad: #c93a36;
  --c1: #2b64d9; --c2: #d8750c; --c3: #0d9480; --c4: #a344bb; --c5: #c2324e; --c6: #6b8e23; --grey: #8a8f9a;
  --shadow: 0 1px 2px rgb(20 20 30 / 5%), 0 4px 14px rgb(20 20 30 / 4%); }
@media (prefers-color-scheme: dark) { :root {
  --page: #121418; --card: #1b1e24; --line: #2e323a; --ink: #e9eaee; --soft: #979ca8; --good: #3fc380; --bad: #f2726c;
  --c1: #6f9cff; --c2: #f5a04c; --c3: #35c9b2; --c4: #d18ae5; --c5: #f27991; --c6: #a5c95a; --grey: #868c98;
  --shadow: none; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem clamp(1rem, 4vw, 2.5rem) 4rem; max-width: 68rem; background: var(--page);
  color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
h1 { font-size: clamp(1.7rem, 4.5vw, 2.4rem); line-height: 1.15; letter-spacing: -0.02em; margin: 0;
  text-wrap: balance; }
header p { color: var(--soft); margin: 0.6rem 0 0; font-size: 1.05rem; max-width: 46rem; }
header { margin-bottom: 2rem; }
header code { white-space: nowrap; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; line-height: 1.3; margin: 3rem 0 0.4rem; }
p, ul.text { max-width: 46rem; margin: 0.6rem 0; }
ul.text { padding-left: 1.2rem; }
code, pre { font: 0.875em/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
code { background: color-mix(in srgb, var(--soft) 14%, transparent); border-radius: 4px; padding: 0.1em 0.35em; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.8rem 1rem;
  margin: 0.8rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre::before { content: "$ "; color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow);
  padding: 1.1rem 1.25rem 1rem; margin: 0; min-width: 0; }
figure.card { display: flex; flex-direction: column; }
.row { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.row > :last-child:nth-child(odd) { grid-column: 1 / -1; }
figcaption { font-weight: 600; line-height: 1.35; margin-bottom: 0.6rem; }
.empty { color: var(--soft); margin: 2rem 0; text-align: center; max-width: none; }
/* headline numbers */
.tiles { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(45%, 11.5rem), 1fr)); }
.tile { display: flex; flex-direction: column; }
.tile .name { color: var(--soft); font-size: 0.875rem; line-height: 1.35; }
.tile .value { font-size: 2.1rem; font-weight: 650; letter-spacing: -0.03em; line-height: 1.25; margin-top: 0.15rem; }
.tile.good .value { color: var(--good); } .tile.bad .value { color: var(--bad); }
.tile .note { color: var(--soft); font-size: 0.8125rem; line-height: 1.4; }
.range { position: relative; height: 6px; border-radius: 3px; margin: 0.45rem 0 0.5rem;
  background: color-mix(in srgb, var(--soft) 18%, transparent); }
.range i, .range b { position: absolute; top: 0; height: 100%; border-radius: 3px; background: currentColor; }
.range i { opacity: 0.35; } .range b { width: 4px; margin-left: -2px; top: -3px; height: 12px; border-radius: 2px; }
.tile.good .range { color: var(--good); } .tile.bad .range { color: var(--bad); } .tile .range { color: var(--c1); }
/* tables */
.table { overflow-x: auto; padding: 0.4rem 0; margin: 1rem 0; }
.table p { color: var(--soft); font-size: 0.875rem; margin: 0.5rem 1.25rem 0.4rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; }
th { font-size: 0.8125rem; font-weight: 600; color: var(--soft); text-align: left;
  border-bottom: 1px solid var(--line); }
td { border-bottom: 1px solid color-mix(in srgb, var(--line) 60%, transparent); }
tr:last-child td { border-bottom: 0; }
th, td { padding: 0.5rem clamp(0.6rem, 1.4vw, 1.25rem); }
td { overflow-wrap: anywhere; min-width: 4rem; } td:first-child { min-width: 6rem; }
th.n, td.n { text-align: right; }
/* curves */
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0 0 0.7rem; padding: 0;
  font-size: 0.875rem; line-height: 1.4; }
.legend i { display: inline-block; width: 1.1rem; border-top: 3px solid var(--c); border-radius: 2px;
  vertical-align: 0.25em;
  margin-right: 0.45rem; }
.legend i.dashed { border-top-style: dashed; border-top-width: 2px; border-radius: 0; }
.y-label, .x-label { color: var(--soft); font-size: 0.8125rem; line-height: 1.3; }
.y-label { margin-bottom: 0.55rem; }
.x-label { grid-column: 2; text-align: right; padding-top: 0.1rem; }
.plot { display: grid; grid-template: 1fr auto auto / auto 1fr; column-gap: 0.6rem; flex: 1; }
.area { position: relative; min-height: clamp(11rem, 34vw, 15rem); touch-action: pan-y; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.area path { vector-effect: non-scaling-stroke; fill: none; stroke-linejoin: round; }
.area .grid { stroke: var(--line); stroke-width: 1; }
.area .line { stroke: var(--c); stroke-width: 2; } .area .dashed { stroke-dasharray: 5 4; stroke-width: 1.5; }
.area .dots { stroke: var(--c); stroke-width: 5; stroke-linecap: round; }
.area .cross { stroke: var(--c); stroke-width: 1.5; opacity: 0.45; }
.area .band { fill: var(--c); opacity: 0.16; }
.y-ticks, .x-ticks { position: relative; color: var(--soft); font-size: 0.75rem; line-height: 1; }
.y-ticks span { position: absolute; right: 0; transform: translateY(50%); white-space: nowrap; }
.x-ticks { grid-column: 2; height: 1.5rem; }
.x-ticks span { position: absolute; top: 0.5rem; transform: translateX(-50%); white-space: nowrap; }
.guide { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--soft); opacity: 0.5; display: none; }
.tip { position: absolute; bottom: calc(100% + 6px); z-index: 1; max-width: 100%; display: none;
  pointer-events: none; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 4px 16px rgb(0 0 0 / 18%); padding: 0.4rem 0.65rem;
  font-size: 0.8125rem; line-height: 1.45; width: max-content; }
.tip div::before { content: ""; display: inline-block; width: 0.6rem; height: 0.6rem; border-radius: 50%;
  background: var(--c); margin-right: 0.4rem; }
.tip header { margin: 0; color: var(--soft); }
/* bars */
.bar, .bar-axis { display: grid; grid-template-columns: minmax(4rem, 8rem) 1fr 11rem; gap: 0 0.9rem;
  align-items: center; }
.bar { font-size: 0.9rem; padding: 0.22rem 0; line-height: 1.3; }
.bar svg { width: 100%; height: 1.35rem; overflow: visible; display: block; }
.bar rect { fill: var(--c); opacity: 0.85; }
.bar .whisker line { stroke: var(--ink); stroke-width: 1.5; }
.bar .value { white-space: nowrap; color: var(--soft); font-size: 0.8125rem; } .bar .value b { color: var(--ink);
  font-size: 0.9rem; }
.bar-group { font-size: 0.8125rem; font-weight: 600; color: var(--soft); margin: 0.7rem 0 0.1rem; }
.bar-group:first-child { margin-top: 0; }
.bar-axis > div { grid-column: 2; position: relative; height: 1.3rem; border-top: 1px solid var(--line);
  margin-top: 0.35rem;
  color: var(--soft); font-size: 0.75rem; }
.bar-axis span { position: absolute; top: 0.3rem; transform: translateX(-50%); line-height: 1; }
.bars { container-type: inline-size; }
@container (max-width: 34rem) {
  .bar, .bar-axis { grid-template-columns: 1fr auto; } .bar svg { grid-row: 2; grid-column: 1 / -1; height: 1rem; }
  .bar-axis > div { grid-column: 1 / -1; } .bar { padding: 0.35rem 0; } }
/* clips */
.clips { display: grid; gap: 0.9rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(46%, 10.5rem), 1fr)); }
.clips.wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
.clips figure { margin: 0; }
.clips video, .clips img { display: block; width: 100%; border-radius: 10px; border: 3px solid var(--line);
  background: var(--line); }
.clips .good video, .clips .good img { border-color: var(--good); } .clips .bad video, .clips .bad img {
  border-color: var(--bad); }
.clips figcaption { font-weight: 400; font-size: 0.8125rem; margin: 0.35rem 0 0; color: var(--soft); line-height: 1.4; }
.clips .good b { color: var(--good); } .clips .bad b { color: var(--bad); }
"""

# A tooltip with the values under the pointer, and no autoplay for readers who prefer reduced motion.
SCRIPT = """
for (const area of document.querySelectorAll('.area')) {
  const chart = JSON.parse(area.dataset.chart), [low, high] = chart.x;
  const guide = area.querySelector('.guide'), tip = area.querySelector('.tip');
  const xs = [...new Set(chart.series.flatMap(line => line.x))].filter(x => x !== null);
  const rate = v => (100 * v).toFixed(1) + '%';
  const text = v => chart.percent ? rate(v) : String(Number(v.toPrecision(4)));
  const add = (tag, content, colour) => {
    const item = tip.appendChild(document.createElement(tag));
    item.textContent = content;
    if (colour) item.style.setProperty('--c', colour);
  };
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    const wanted = low + (event.clientX - box.left) / box.width * (high - low);
    const x = xs.reduce((best, other) => Math.abs(other - wanted) < Math.abs(best - wanted) ? other : best);
    const at = (x - low) / (high - low);
    tip.replaceChildren();
    add('header', chart.x_percent ? rate(x) : x.toLocaleString('en'));
    chart.series.forEach(line => {
      const i = line.x.indexOf(x);
      if (i < 0 || line.y[i] === null) return;
      const band = line.low && line.low[i] !== null ? ` [${text(line.low[i])}, ${text(line.high[i])}]` : '';
      add('div', `${line.name}  ${text(line.y[i])}${band}`, line.colour);
    });
    guide.style.display = tip.style.display = 'block';
    guide.style.left = at * box.width + 'px';
    const room = box.width - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, at * box.width - tip.offsetWidth / 2)) + 'px';
  });
  area.addEventListener('pointerleave', () => { guide.style.display = tip.style.display = 'none'; });
}
if (matchMedia('(prefers-reduced-motion: reduce)').matches)
  for (const clip of document.querySelectorAll('video')) { clip.pause(); clip.controls = true; }
"""

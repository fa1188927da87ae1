/* A tooltip with the values under the pointer, and no autoplay for readers who prefer reduced motion. */
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

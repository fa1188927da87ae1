'use strict';
const token = new URLSearchParams(location.search).get('token');
const find = id => document.getElementById(id);
const make = (tag, text, kind) => {
  const item = document.createElement(tag);
  if (text !== undefined) item.textContent = text;
  if (kind) item.className = kind;
  return item;
};
const rate = v => v === null ? '–' : (100 * v).toFixed(1) + ' %';
const interval = one => one.episodes ? `${rate(one.success)} [${(100 * one.low).toFixed(1)}, ${(100 * one.high).toFixed(1)}]` : '–';
const share = one => one.steps ? rate(one.intervened / one.steps) : '–';
const count = n => n.toLocaleString('en');
const span = s => s === null ? 'not since the start' : s < 90 ? `${s.toFixed(0)} s` : s < 5400 ? `${(s / 60).toFixed(0)} min`
  : `${(s / 3600).toFixed(1)} h`;

function table(id, heads, rows, empty) {
  const head = make('tr'), body = rows.map(cells => {
    const row = make('tr');
    row.append(...cells.map(([text, kind]) => text instanceof Node ? wrap(text, kind) : make('td', text, kind)));
    return row;
  });
  head.append(...heads.map(([text, kind]) => make('th', text, kind)));
  find(id).replaceChildren(...(rows.length ? [head, ...body] : [make('caption', empty, 'empty')]));
}
function wrap(node, kind) { const cell = make('td', undefined, kind); cell.append(node); return cell; }

function tile(name, value, note) {
  const card = make('div', undefined, 'card tile');
  card.append(make('div', name, 'name'), make('div', value, 'value'), make('div', note, 'note'));
  return card;
}

function curve(recent) {
  const width = 20, first = 4;  // a mean of fewer episodes says nothing
  if (recent.length < first + 2) { find('curve').replaceChildren(make('p', 'No curve yet.', 'empty')); return; }
  const space = 'http://www.w3.org/2000/svg', svg = document.createElementNS(space, 'svg');
  svg.setAttribute('viewBox', '0 0 100 100');
  svg.setAttribute('preserveAspectRatio', 'none');
  const line = (kind, d) => {
    const path = document.createElementNS(space, 'path');
    path.setAttribute('class', kind); path.setAttribute('d', d);
    path.setAttribute('vector-effect', 'non-scaling-stroke');
    svg.append(path);
  };
  for (const y of [0, 50, 100]) line('grid', `M0 ${y}H100`);
  line('line', 'M' + recent.slice(first).map((_, i) => {
    const part = recent.slice(Math.max(0, i + first + 1 - width), i + first + 1);
    const mean = part.filter(one => one[1]).length / part.length;
    return `${100 * i / (recent.length - first - 1)} ${100 - 100 * mean}`;
  }).join('L'));
  find('curve').replaceChildren(svg, make('div', `0 to 100 %, over the last ${count(recent.length)} episodes of all robots`, 'note'));
}

function show(seen) {
  const robots = Object.entries(seen.robots), versions = Object.entries(seen.versions).reverse();
  const total = seen.total, active = versions.find(([, one]) => one.state === 'active');
  const waiting = robots.reduce((sum, [, one]) => sum + one.waiting, 0);
  find('tiles').replaceChildren(
    tile('Robots', `${robots.filter(([, one]) => one.connected).length} of ${robots.length}`, 'connected'),
    tile('Success', rate(total.success), total.episodes ? `${interval(total).slice(interval(total).indexOf('['))} of all episodes` : 'no episode yet'),
    tile('Episodes', count(total.episodes), `${span(total.seconds)} on robots`),
    tile('Interventions', share(total), 'of control steps'),
    tile('Policy', active ? active[0] : '–', active ? 'active version' : 'none is active'),
    tile('Waiting', count(waiting), 'records on robots when last heard'),
    ...('updates' in seen.learner ? [tile('Learner', count(seen.learner.updates), `updates, from ${count(seen.learner.episodes)} episodes, ${span(seen.learner_silent)} ago`)] : []));
  table('robots', [['Robot'], ['Task'], ['Policy', 'n'], ['Episodes', 'n'], ['Success [95 %]', 'n'], ['Intervened', 'n'], ['Waiting', 'n'],
    ['Given up', 'n'], ['Last heard', 'n']], robots.map(([name, one]) => [[name, 'dot' + (one.connected ? ' good' : '')],
    [one.task || '–', 'task'], [String(one.version), 'n'], [count(one.episodes), 'n'], [interval(one), 'n'], [share(one), 'n'],
    [count(one.waiting) + (one.connected ? '' : ' then'), 'n'], [count(one.dropped), 'n' + (one.dropped ? ' warn' : '')], [span(one.silent), 'n']]),
    'No robot has connected yet.');
  table('versions', [['Version'], ['State'], ['Episodes', 'n'], ['Success [95 %]', 'n'], ['Intervened', 'n']],
    versions.map(([name, one]) => [[name], [make('span', one.state || 'not published here', 'state ' + one.state)],
    [count(one.episodes), 'n'], [interval(one), 'n'], [share(one), 'n']]), 'No policy has been published yet.');
  curve(seen.recent);
  find('alarms').replaceChildren(...(seen.alarms.length ? seen.alarms.map(one => {
    const item = make('li');
    item.append(make('time', new Date(1000 * one.at).toLocaleString()), make('span', one.sentence));
    return item;
  }) : [make('li', 'None.')]));
}

const live = find('live');
let told = 'before now';
const events = new EventSource('/events' + (token ? '?token=' + encodeURIComponent(token) : ''));
events.onmessage = event => {
  const seen = JSON.parse(event.data);
  told = new Date().toLocaleTimeString();
  live.textContent = `live, server up for ${span(seen.seconds)}`;
  live.className = 'good';
  show(seen);
};
events.onerror = () => { live.textContent = `the server does not answer; this is of ${told}; trying again`; live.className = 'bad'; };

'use strict';
const known = new Set([...document.querySelectorAll('kbd')].map(cap => cap.dataset.key));
const at = id => document.getElementById(id);
const percent = x => x === null ? '–' : (100 * x).toFixed(0) + '%';
let busy = false;

function paint(shape, text) {
  const [height, width] = shape, bytes = atob(text), canvas = at('picture');
  canvas.width = width; canvas.height = height;
  const image = new ImageData(width, height);
  for (let i = 0, j = 0; i < bytes.length; i += 3, j += 4) {
    for (let c = 0; c < 3; c++) image.data[j + c] = bytes.charCodeAt(i + c);
    image.data[j + 3] = 255;
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
}

async function show(view) {
  for (const [i, picture] of view.pictures.entries()) {
    if (i) await new Promise(done => setTimeout(done, 110));
    paint(view.shape, picture);
  }
  const won = view.cause === 'success', over = view.cause !== '';
  at('screen').className = 'card screen' + (over ? (won ? ' good' : ' bad') : '');
  at('instruction').textContent = view.instruction;
  at('step').textContent = `rollout ${view.episode + 1}, control step ${view.step} of ${view.steps}`
    + (view.grip === null ? '' : `, gripper ${view.grip > 0 ? '+' : ''}${view.grip}`);
  for (const name of ['done', 'success_probability']) {
    at(name).textContent = percent(view[name]);
    at(name + '-bar').style.width = 100 * (view[name] ?? 0) + '%';
  }
  const mode_uncertainty = view.limit !== null && view.uncertainty > view.limit;
  const share = view.limit ? view.uncertainty / view.limit : mode_uncertainty ? 2 : 0;
  at('uncertainty').textContent = view.uncertainty === null ? '–'
    : view.uncertainty.toFixed(3) + (view.limit === null ? ', no limit' : ' of ' + view.limit.toFixed(3));
  at('uncertainty-bar').style.width = Math.min(100, 50 * share) + '%';
  at('uncertainty-track').className = 'track' + (mode_uncertainty ? ' bad' : '');
  at('end').textContent = view.end;
  at('end').className = 'end' + (won ? ' good' : '');
  at('remark').textContent = view.remark;
}

async function ask(path, options) {
  if (busy) return;
  busy = true;
  try {
    const answer = await fetch(path, options);
    if (answer.ok) await show(await answer.json());
    else at('remark').textContent = await answer.text();
  } catch (error) {
    at('remark').textContent = 'No answer: vla-rl imagine play has ended.';
  }
  busy = false;
}

const press = key => ask('/press', {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({key})});

document.addEventListener('keydown', event => {
  const key = event.key.toLowerCase();
  if (!known.has(key) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  press((event.shiftKey && !'rbp '.includes(key) ? 'shift+' : '') + key);
});
for (const cap of document.querySelectorAll('kbd')) cap.addEventListener('click', () => press(cap.dataset.key));
ask('/view');

// The live page: one stream of events in, one drawing a second out. No text of any request ever comes here.
//
// view    what /cluster/stream says of the cluster (cluster/ui/view.py has its fields)
// story   events of the log, newest first; those of one span are one item

const HISTORY_S = 600, SILENCE_MS = 4000, RETRY_MS = 5000;
const LARGE = 8, SMALL = 64; // instances drawn as large cards, as small ones; more are drawn on a canvas
const MAX_ITEMS = 60;
const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let view = null, stream = null, heardMs = 0, announced = 0;
const before = { time: 0, totals: new Map() }; // for rates: totals of each life at the look before
const rates = new Map(); // instance id -> {output, prompt, moved} a second
const items = new Map(); // span or number -> item of the story

// Words and numbers ---------------------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}
const seconds = (s) => (s < 1 ? `${(s * 1000).toFixed(s < 0.1 ? 1 : 0)} ms` : `${s.toFixed(s < 10 ? 2 : 0)} s`);
const number = (n) => Math.round(n).toLocaleString("en");
const percent = (share) => `${Math.round(share * 100)} %`;
const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
const clock = (s) => new Date(s * 1000).toLocaleTimeString([], { hour12: false });
const sum = (of) => { let total = 0; for (const i of Object.values(view.instances)) total += of(shown(i)); return total; };
function listed(ids) {
  if (ids.length > 4) return `${ids[0]} to ${ids.at(-1)}`;
  return ids.length < 2 ? `${ids[0]}` : `${ids.slice(0, -1).join(", ")} and ${ids.at(-1)}`;
}
function membersOf(name) {
  const found = /@\(([\d,.]+)\)/.exec(name || "");
  return found ? found[1].split(",").map(Number) : [];
}
const meaning = (shape) => shape.startsWith("tp") ? "share the work of each request" : shape.startsWith("pp")
  ? `each keeps a ${{ 2: "half", 4: "quarter", 8: "eighth" }[shape.slice(2)] || "part"} of the layers, the rest is room for KV` : "alone";
const DONE = {
  merge: (ids, shape) => `${listed(ids)} became one group, ${shape}`,
  split: (ids) => `${listed(ids)} serve apart again`,
  drop: (ids, shape) => `${listed(ids)} dropped weights for KV, ${shape}`,
  restore: (ids) => `${listed(ids)} have their weights back`,
};
const DOING = {
  merge: (ids) => `Merging ${listed(ids)}`, split: (ids) => `Splitting ${listed(ids)}`,
  drop: (ids) => `${listed(ids)} drop weights to make room for KV`, restore: (ids) => `${listed(ids)} take their weights back`,
};

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
function write(element, text) { if (element.textContent !== text) element.textContent = text; }
const put = (id, text) => write($(id), text);

// The stream ----------------------------------------------------------------------------------------------------------

function connect() {
  stream = new EventSource("/cluster/stream");
  stream.addEventListener("snapshot", (e) => {
    const data = JSON.parse(e.data);
    retell(data.story);
    delete data.story;
    view = data;
    heard();
  });
  stream.addEventListener("delta", (e) => {
    const delta = JSON.parse(e.data);
    if (view) { apply(delta); heard(); } else if (delta.is_away) live("away", "The controller does not answer");
  });
  stream.addEventListener("decision", (e) => { tell(JSON.parse(e.data)); heardMs = Date.now(); });
  stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) refused(); };
}

async function refused() { // the server answered with an error: the key may count no more
  const answer = await fetch("/ui", { cache: "no-store" }).catch(() => null);
  if (answer && answer.status === 401) { location.reload(); return; }
  live("away", "The server does not send; trying again");
  setTimeout(connect, RETRY_MS);
}

function apply(delta) {
  const { instances = {}, gone = [], ...rest } = delta;
  Object.assign(view, rest);
  for (const id of gone) delete view.instances[id];
  for (const [id, fields] of Object.entries(instances)) view.instances[id] = Object.assign(view.instances[id] || {}, fields);
}

function heard() {
  heardMs = Date.now();
  measure();
  requestAnimationFrame(draw);
}

function live(state, text) { $("live").dataset.state = state; put("live-text", text); }

setInterval(() => {
  if (view && Date.now() - heardMs > SILENCE_MS) live("away", `No news since ${clock(heardMs / 1000)}`);
}, 1000);

function measure() { // rates from totals, which begin at zero with each life of an instance
  const elapsed = view.time_s - before.time;
  if (elapsed <= 0) return;
  for (const [id, i] of Object.entries(view.instances)) {
    const known = before.totals.get(id), same = known && known.key === i.key && before.time > 0;
    const per = (name) => (same ? Math.max(0, i[name] - known[name]) / elapsed : 0);
    rates.set(id, { output: per("output_tokens"), prompt: per("prompt_tokens"), moved: per("moved") });
    before.totals.set(id, { key: i.key, output_tokens: i.output_tokens, prompt_tokens: i.prompt_tokens, moved: i.moved });
  }
  for (const id of [...rates.keys()]) if (!view.instances[id]) { rates.delete(id); before.totals.delete(id); }
  if (before.time > 0) record(elapsed);
  before.time = view.time_s;
}
const rate = (name) => { let total = 0; for (const r of rates.values()) total += r[name]; return total; };

// One frame -----------------------------------------------------------------------------------------------------------

function draw() {
  if (!view) return;
  const startedMs = performance.now();
  live(view.is_away ? "away" : "live", view.is_away ? "The controller does not answer; serving goes on" : "Live");
  put("app", view.app);
  drawHeadline();
  drawFigures();
  drawMap();
  drawCharts();
  if ($("instance-dialog").open) drawFacts();
  document.documentElement.dataset.frameMs = (performance.now() - startedMs).toFixed(2);
}

function drawHeadline() {
  const all = Object.values(view.instances), ready = all.filter((i) => i.state === "ready").length;
  const ids = Object.keys(view.instances).filter((id) => view.instances[id].state !== "ready");
  const [under] = view.switching;
  const groups = view.groups.map((g) => `${listed(g.members)} serve as one, ${g.shape}`);
  const grouped = new Set(view.groups.flatMap((g) => g.members)).size;
  let text;
  if (!all.length) text = "No instance yet";
  else if (under) text = `${DOING[under.verb](under.members)}${view.switching.length > 1 ? `, and ${view.switching.length - 1} more` : ""}`;
  else if (!ready) text = "No instance is ready";
  else if (!view.groups.length) text = all.length === 1 ? "One instance serves" : `${plural(ready, "instance")} ${ready === 1 ? "serves" : "serve"} alone`;
  else {
    const alone = all.length - grouped;
    text = groups.length > 2 ? `${groups.length} groups serve as one each` : `Instances ${groups.join("; ")}`;
    text += alone > 0 ? `; ${number(alone)} alone` : "";
  }
  if (ids.length && ready) text += ids.length === 1 ? `; instance ${ids[0]} is ${said(view.instances[ids[0]])}` : `; ${ids.length} are not ready`;
  put("headline", text);
  const who = view.policy.is_auto ? "The cluster follows its load." : view.policy.target ? `An operator keeps it at ${view.policy.target}.` : "The layout is fixed.";
  const switched = view.switch ? ` Last change: ${view.switch.what}, ${view.switch.phase}${view.switch.why ? `, because ${view.switch.why}` : ""}.` : "";
  put("subline", who + switched);
}
const said = (i) => (i.state === "dead" ? "dead" : i.state === "draining" ? "being emptied" : i.phase || "starting");

function drawFigures() {
  const traffic = view.traffic || {};
  put("sum-output", number(rate("output")));
  if (traffic.ttft_p50_s != null) put("sum-ttft", seconds(traffic.ttft_p50_s)); // of the newest second that had one
  for (const name of ["running", "waiting"]) put(`sum-${name}`, number(sum((i) => i[name])));
  put("sum-parked", number(sum((i) => i.parked + i.paused)));
  put("sum-moving", number(rate("moved")));
  const room = sum((i) => i.kv);
  const classes = Object.entries(traffic.classes ?? {}), answers = classes.reduce((n, [, c]) => n + c.answers, 0);
  $("attainment").hidden = !answers;
  if (answers) {
    put("sum-slo", percent(classes.reduce((n, [, c]) => n + c.kept * c.answers, 0) / answers));
    const told = classes.map(([name, c]) => `${name} ${percent(c.kept)}`).join(", ");
    put("sum-classes", classes.length > 1 ? told : classes[0][0]);
    $("attainment").title = told;
  }
  put("sum-kv", room ? percent(sum((i) => i.kv_used) / room) : "–");
}

// The map -------------------------------------------------------------------------------------------------------------

const cards = new Map(); // instance id -> elements of its card
let rafts = "", mode = "";

function drawMap() {
  const ids = Object.keys(view.instances).map(Number).sort((a, b) => a - b), map = $("map");
  const wanted = ids.length <= LARGE ? "large" : ids.length <= SMALL ? "small" : "grid";
  if (wanted !== mode) { mode = wanted; map.className = mode; map.replaceChildren(); cards.clear(); rafts = ""; }
  for (const item of document.querySelectorAll(".host-only")) item.hidden = !ids.some((id) => view.instances[id].host);
  if (mode === "grid") { drawGrid(ids); return; }
  const busy = new Set(view.switching.flatMap((s) => s.members));
  const lone = ids.filter((id) => !view.groups.some((g) => g.members.includes(id)));
  const found = [...view.groups.map((g) => ({ ...g, members: g.members.filter((id) => ids.includes(id)) })),
    ...lone.map((id) => ({ name: `dp@(${id})`, shape: "dp", members: [id] }))].sort((a, b) => a.members[0] - b.members[0]);
  const names = found.map((g) => g.name).join(" ");
  if (names !== rafts) { rafts = names; moved(() => arrange(found)); }
  for (const raft of map.querySelectorAll(".raft")) raft.classList.toggle("busy", raft.dataset.members.split(",").some((id) => busy.has(Number(id))));
  for (const id of ids) drawCard(id, view.instances[id]);
}

function arrange(found) {
  const holder = make("div", "rafts"), kept = new Set();
  for (const group of found) {
    const raft = make("section", group.shape === "dp" ? "raft" : "raft group");
    raft.dataset.members = group.members.join(",");
    raft.dataset.group = group.name;
    raft.setAttribute("aria-label", group.shape === "dp" ? "alone" : `${group.name}: they ${meaning(group.shape)}`);
    const name = make("p", "raft-name");
    name.append(make("b", "", group.shape), make("span", "", meaning(group.shape)));
    const list = make("ul");
    for (const id of group.members) { list.append(card(id).item); kept.add(id); }
    raft.append(name, list);
    holder.append(raft);
  }
  for (const id of [...cards.keys()]) if (!kept.has(id)) cards.delete(id);
  $("map").replaceChildren(holder);
}

function moved(change) { // cards glide from where they were to where they are
  const focused = document.activeElement?.closest?.("[data-id]")?.dataset.id;
  const was = new Map([...cards].map(([id, c]) => [id, c.item.getBoundingClientRect()]));
  change();
  if (focused !== undefined) cards.get(Number(focused))?.button.focus();
  if (calm.matches) return;
  for (const [id, c] of cards) {
    const from = was.get(id);
    if (!from || !from.width) continue;
    const to = c.item.getBoundingClientRect(), x = from.left - to.left, y = from.top - to.top;
    if (x || y) c.item.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: 900, easing: "cubic-bezier(0.3, 0, 0.2, 1)" });
  }
}

function card(id) {
  if (cards.has(id)) return cards.get(id);
  const item = make("li"), button = make("button", "card"), c = { item, button };
  button.type = "button";
  button.dataset.id = id;
  button.addEventListener("click", () => openInstance(id));
  const part = (parent, tag, className, field) => { const e = make(tag, className); if (field) { e.dataset.field = field; c[field] = e; } parent.append(e); return e; };
  const who = part(button, "div", "who");
  write(part(who, "span", "name", "name"), `${id}`);
  part(who, "span", "doing", "doing");
  part(who, "span", "rate", "rate");
  const bar = part(button, "div", "bar");
  c.weightsBar = part(bar, "span", "weights");
  c.kvBar = part(bar, "span", "kv");
  c.hostTrack = part(button, "div", "bar on-host");
  c.hostBar = part(c.hostTrack, "span", "host");
  const sizes = part(button, "div", "sizes");
  part(sizes, "span", "", "weights");
  part(sizes, "span", "", "kv");
  const counts = part(button, "div", "counts");
  for (const name of ["running", "waiting", "parked", "paused"]) {
    const box = part(counts, "span", name);
    c[`${name}Box`] = box;
    part(box, "b", "", name);
    part(box, "span", "word").textContent = ` ${name}`;
    part(box, "span", "short").textContent = ` ${{ running: "run", waiting: "wait" }[name] ?? name}`;
  }
  item.append(button);
  cards.set(id, c);
  return c;
}

const GONE = { running: 0, waiting: 0, parked: 0, paused: 0, weights: 0, kv: 0, kv_used: 0, host: 0, host_used: 0 };
const shown = (i) => (i.state === "dead" || i.state === "starting" ? { ...i, ...GONE } : i); // nothing is there yet, or any more

function drawCard(id, told) {
  const i = shown(told), c = card(id), whole = Math.max(i.weights + i.kv, 1), share = i.kv ? i.kv_used / i.kv : 0;
  const leads = i.leader === id, doing = i.state !== "ready" ? said(i) : i.leaving ? "leaving its group" : i.shape === "dp" ? "" : leads ? `${i.shape}, leads` : `${i.shape}, with ${i.leader}`;
  c.button.dataset.state = i.state;
  write(c.doing, doing);
  write(c.rate, i.state === "ready" && rates.get(`${id}`)?.output ? `${number(rates.get(`${id}`).output)} tok/s` : "");
  c.weightsBar.style.width = `${(i.weights / whole) * 100}%`;
  c.kvBar.style.width = `${(i.kv_used / whole) * 100}%`;
  c.kvBar.classList.toggle("hot", share > 0.9);
  c.hostTrack.hidden = !i.host;
  if (i.host) c.hostBar.style.width = `${(i.host_used / i.host) * 100}%`;
  write(c.weights, i.weights ? `${bytes(i.weights)} weights` : "");
  write(c.kv, i.kv ? `KV ${bytes(i.kv_used)} of ${bytes(i.kv)}` : "");
  for (const name of ["running", "waiting", "parked", "paused"]) {
    write(c[name], number(i[name]));
    c[`${name}Box`].hidden = !i[name] && name !== "running" && name !== "waiting";
    c[`${name}Box`].classList.toggle("some", name !== "running" && i[name] > 0);
  }
  const label = `Instance ${id}, ${i.state}${doing ? `, ${doing}` : ""}, KV ${percent(share)} full, ${i.running} running, ${i.waiting} waiting${i.parked ? `, ${i.parked} parked` : ""}${i.host ? `, host tier ${percent(i.host_used / i.host)} full` : ""}`;
  if (c.button.getAttribute("aria-label") !== label) c.button.setAttribute("aria-label", label);
}

// Hundreds of instances: a canvas, and the busiest of them as a table --------------------------------------------------

let grid = null;
function drawGrid(ids) {
  if (!grid) {
    grid = { canvas: make("canvas", "grid"), table: make("table", "busiest"), places: [] };
    grid.canvas.setAttribute("role", "img");
    grid.canvas.addEventListener("click", (e) => {
      const hit = grid.places.find((p) => e.offsetX >= p.x && e.offsetX < p.x + grid.size && e.offsetY >= p.y && e.offsetY < p.y + grid.size);
      if (hit) openInstance(hit.id);
    });
  }
  if (!grid.canvas.isConnected) $("map").replaceChildren(grid.canvas, grid.table);
  const width = $("map").clientWidth, size = ids.length > 400 ? 17 : 30, gap = ids.length > 400 ? 3 : 4, per = Math.max(1, Math.floor(width / (size + gap)));
  const order = [...view.groups.flatMap((g) => g.members), ...ids];
  const placed = [...new Set(order)].filter((id) => view.instances[id]);
  const height = Math.ceil(placed.length / per) * (size + gap), scale = devicePixelRatio || 1, { canvas } = grid;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); canvas.style.height = `${height}px`;
  }
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`);
  const [free, weights, kv, hot, bad, wait, line] = ["free", "weights-soft", "kv", "kv-hot", "bad", "wait", "raft-line"].map(colour);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  grid.size = size;
  grid.places = placed.map((id, place) => ({ id, x: (place % per) * (size + gap), y: Math.floor(place / per) * (size + gap) }));
  for (const { id, x, y } of grid.places) {
    const i = view.instances[id], whole = Math.max(i.weights + i.kv, 1), up = (part) => (part / whole) * size;
    pen.fillStyle = free; pen.fillRect(x, y, size, size);
    if (i.state === "dead" || i.state === "starting") { pen.strokeStyle = i.state === "dead" ? bad : wait; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, size - 2, size - 2); continue; }
    pen.fillStyle = weights; pen.fillRect(x, y + size - up(i.weights), size, up(i.weights));
    pen.fillStyle = i.kv_used > 0.9 * i.kv ? hot : kv; pen.fillRect(x, y + size - up(i.weights + i.kv_used), size, up(i.kv_used));
    if (i.waiting) { pen.fillStyle = wait; pen.beginPath(); pen.arc(x + size - 3.5, y + 3.5, 2.5, 0, 7); pen.fill(); }
    if (i.leader !== id) { pen.fillStyle = line; pen.fillRect(x - gap, y + size / 2 - 2, gap, 4); } // tied to its leader's side
  }
  const states = Object.entries(Object.groupBy ? Object.groupBy(placed, (id) => view.instances[id].state) : {}).map(([state, of]) => `${of.length} ${state}`);
  canvas.setAttribute("aria-label", `${placed.length} instances: ${states.join(", ")}. The busiest are in the table below.`);
  const busiest = placed.map((id) => [id, view.instances[id]]).sort(([, a], [, b]) => rank(b) - rank(a)).slice(0, 10);
  drawBusiest(busiest);
}
const rank = (i) => (i.state === "ready" ? 0 : 1e9) + i.waiting * 1e3 + i.running + (i.kv ? i.kv_used / i.kv : 0);

function drawBusiest(rows) {
  const { table } = grid;
  if (!table.tBodies.length) {
    table.append(make("caption", "", "The busiest, and those that are not ready"));
    const head = table.createTHead().insertRow();
    for (const name of ["instance", "state", "shape", "KV", "running", "waiting", "parked"]) { const th = make("th", "", name); th.scope = "col"; head.append(th); }
    const body = table.createTBody();
    for (let n = 0; n < 10; n += 1) { const row = body.insertRow(); const open = make("button"); open.addEventListener("click", () => openInstance(Number(open.textContent))); row.insertCell().append(open); for (let k = 0; k < 6; k += 1) row.insertCell(); }
  }
  [...table.tBodies[0].rows].forEach((row, n) => {
    row.hidden = !rows[n];
    if (!rows[n]) return;
    const [id, i] = rows[n];
    row.dataset.id = id;
    write(row.cells[0].firstChild, `${id}`);
    [i.state, i.shape, i.kv ? percent(i.kv_used / i.kv) : "–", number(i.running), number(i.waiting), number(i.parked)].forEach((text, k) => write(row.cells[k + 1], text));
  });
}

// Charts --------------------------------------------------------------------------------------------------------------

const history = { time: [], output: [], prompt: [], p50: [], p99: [], running: [], waiting: [], parked: [] };
const NAMES = { p50: "median", p99: "99 percent" };
const marks = []; // times of switches, which each chart shows as a line
let charts = null;

function record() {
  const traffic = view.traffic || {}, now = {
    time: view.time_s, output: rate("output"), prompt: rate("prompt"), p50: traffic.ttft_p50_s ?? null, p99: traffic.ttft_p99_s ?? null,
    running: sum((i) => i.running), waiting: sum((i) => i.waiting), parked: sum((i) => i.parked + i.paused),
  };
  for (const [name, values] of Object.entries(history)) {
    values.push(now[name]);
    while (values.length > HISTORY_S) values.shift();
  }
}

function drawCharts() {
  if (!window.uPlot || document.hidden) return;
  const dark = document.documentElement.dataset.shown;
  if (charts && charts.dark !== dark) { for (const c of charts.all) c.plot.destroy(); charts = null; }
  if (!charts) charts = { dark, all: [chart("chart-tokens", ["output", "prompt"], number), chart("chart-ttft", ["p50", "p99"], seconds), chart("chart-requests", ["running", "waiting", "parked"], number)] };
  const end = view.time_s, start = end - Math.min(HISTORY_S, Math.max(60, end - (history.time[0] ?? end)));
  for (const c of charts.all) {
    const box = $(c.id).clientWidth;
    if (box && c.plot.width !== box) c.plot.setSize({ width: box, height: 150 });
    const told = c.names.map((n) => `${NAMES[n] ?? n} ${history[n].at(-1) == null ? "none" : c.format(history[n].at(-1))}`);
    if (told.length && history.time.length % 5 === 1) $(c.id).setAttribute("aria-label", `now ${told.join(", ")}`);
    c.plot.batch(() => { c.plot.setData([history.time, ...c.names.map((n) => history[n])], false); c.plot.setScale("x", { min: start, max: end }); });
  }
}

function chart(id, names, format) {
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = [colour("kv"), colour("weights"), colour("host")], axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const plot = new window.uPlot({
    width: $(id).clientWidth || 300, height: 150, legend: { show: false }, cursor: { y: false, points: { size: 6 } }, padding: [8, 4, 0, 0],
    scales: { x: { time: true }, y: { range: (u, min, max) => [0, Math.max(max * 1.15, 1e-3) || 1] } },
    axes: [{ ...axis, grid: { show: false }, size: 24, space: 70, values: (u, splits) => splits.map((s) => clock(s).slice(0, s % 60 ? 8 : 5)) },
      { ...axis, size: 58, space: 34, values: (u, splits) => splits.map((v) => (v == null ? "" : format === seconds ? (v === 0 ? "0" : seconds(v)) : v < 10 && v % 1 ? v.toFixed(1) : format(v))) }],
    series: [{}, ...names.map((name, n) => ({ label: name, stroke: colours[n], width: 1.75, fill: n === 0 ? `${colours[0]}1f` : undefined, points: { show: format === seconds, size: 3 }, spanGaps: format === seconds }))],
    hooks: { draw: [(u) => {
      u.ctx.save();
      u.ctx.strokeStyle = colour("faint"); u.ctx.lineWidth = devicePixelRatio || 1; u.ctx.setLineDash([3, 4]);
      for (const at of marks) {
        const x = Math.round(u.valToPos(at, "x", true));
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
      }
      u.ctx.restore();
    }] },
  }, [history.time, ...names.map((n) => history[n])], $(id));
  $(id).setAttribute("role", "img");
  return { id, names, format, plot };
}

// The story -----------------------------------------------------------------------------------------------------------

function retell(events) {
  items.clear();
  marks.length = 0;
  $("story").replaceChildren();
  for (const event of events) tell(event, true);
  if (!events.length) $("story").append(make("li", "empty dim", "Nothing yet."));
}

function tell(event, quietly = false) {
  const key = event.span && !event.span.startsWith("controller") ? `${event.kind.startsWith("plan") ? "plan" : event.kind.split("_")[0]}:${event.span}` : `#${event.seq}`;
  const told = TELL[event.kind];
  if (!told) return;
  const known = items.get(key), item = known || { node: make("li", "item"), parts: {} };
  item.parts[event.kind] = event;
  const words = told(event, item.parts);
  if (!words) return;
  if (event.kind === "transition_end") marks.push(event.time_s);
  items.set(key, item);
  item.node.className = `item ${words.look || ""}${quietly ? "" : " new"}`;
  item.node.dataset.kind = event.kind;
  item.node.dataset.seq = event.seq;
  const time = make("time", "", clock(event.time_s));
  time.dateTime = new Date(event.time_s * 1000).toISOString();
  item.node.replaceChildren(time, make("p", "what", words.what));
  if (words.why) item.node.append(make("p", "why", words.why));
  if (words.more) item.node.append(words.more);
  const list = $("story");
  list.querySelector(".empty")?.remove();
  list.prepend(item.node);
  while (list.children.length > MAX_ITEMS) list.lastChild.remove();
  while (items.size > 2 * MAX_ITEMS) items.delete(items.keys().next().value);
  if (!quietly && Date.now() - announced > 1000) { announced = Date.now(); put("announce", `${words.what}. ${words.why || ""}`); }
}

const lifeOf = (event) => /(\d+)\./.exec(event.span)?.[1] ?? "?";
const TELL = {
  plan_decided: (e, parts) => decision(e, parts.plan_outcome),
  plan_outcome: (e, parts) => (parts.plan_decided ? decision(parts.plan_decided, e) : outcomeAlone(e)),
  policy_changed: (e) => ({ what: e.data.is_auto ? "The cluster follows its load" : `Asked to keep ${e.data.groups}`, look: "chosen" }),
  transition_start: (e) => ({ what: DOING[e.data.switch]?.(membersOf(e.data.what)) ?? e.data.what, why: because(e.why), look: "busy" }),
  transition_end: (e) => ({ what: DONE[e.data.switch]?.(membersOf(e.data.what), e.data.what.split(" ")[1]?.split("@")[0]) ?? e.data.what, why: `${switched(e.data)}${e.why ? ` ${because(e.why)}` : ""}`, look: "done" }),
  transition_error: (e) => ({ what: `Gave up: ${e.data.what ?? "a change of shape"}`, why: e.why, look: "bad" }),
  instance_ready: (e) => ({ what: `Instance ${lifeOf(e)} is ready`, why: e.data.start_s ? `It started in ${seconds(e.data.start_s)}.` : "", look: "done" }),
  instance_lost: (e) => ({ what: `Instance ${lifeOf(e)} died; it is replaced`, why: e.why, look: "bad" }),
  instance_error: (e) => ({ what: `Instance ${lifeOf(e)} failed; it is tried again`, why: e.why, look: "bad" }),
  instance_drain_start: (e) => ({ what: `Instance ${lifeOf(e)} is being emptied`, why: e.why, look: "busy" }),
  instance_drain_end: (e) => ({ what: `Instance ${lifeOf(e)} is empty`, why: e.why, look: "done" }),
  instance_drain_error: (e) => ({ what: `Instance ${lifeOf(e)} was not empty in time`, why: e.why, look: "bad" }),
  instance_undrained: (e) => ({ what: `Slot ${e.data.instance_id ?? lifeOf(e)} may be filled again`, look: "chosen" }),
  controller_recovered: (e) => ({ what: "A controller took over", why: e.why }),
  controller_stop: (e) => ({ what: "A controller ended", why: e.why }),
};
const because = (why) => (why ? `Why: ${why}.` : "");

function switched(data) {
  const counts = ["carried", "recomputed", "paused", "redirected"].filter((n) => data[`num_${n}`]).map((n) => `${number(data[`num_${n}`])} ${n}`);
  const kv = data.carried_bytes ? ` with ${bytes(data.carried_bytes)} of KV` : "";
  return `No step for ${seconds(data.cutover_s ?? 0)}${counts.length ? `; requests: ${counts.join(", ")}${kv}` : ""}.`;
}

function named(option) { return option.action === "keep" ? "keep the layout" : `${option.action} ${option.group}`.trim(); }

function decision(event, outcome) {
  const d = event.data, more = make("div");
  const others = (d.options || []).filter((o) => o.action !== d.action || o.group !== d.group);
  const first = d.predicted ? `First token after ${seconds(d.predicted.ttft_s)} predicted` : "";
  if (outcome) more.append(comparison([["predicted", outcome.data.predicted.ttft_s, "chosen"], ["measured", outcome.data.measured.ttft_s, "measured"]], "first token"));
  if (others.length) {
    const box = make("details"), all = [d, ...others].slice(0, 8);
    box.append(make("summary", "", `${plural(others.length, "other choice")}`));
    const priced = all.filter((o) => o.predicted);
    if (priced.length) box.append(comparison(priced.map((o) => [named(o), o.predicted.ttft_s, o === d ? "chosen" : ""]), "predicted first token"));
    else box.append(comparison(all.map((o) => [named(o), o.price_s, o === d ? "chosen" : ""]), "price in request-seconds"));
    more.append(box);
  }
  const gain = d.gain_s ? `It gains ${seconds(d.gain_s)} of waiting and costs ${seconds(d.price_s)}. ` : "";
  const short = d.needs_instances ? " More instances would help." : "";
  return { what: d.action === "keep" ? "Memory is short, and no change pays" : `Decided to ${named(d)}`, why: `${gain}${first}${first ? ". " : ""}${because(event.why)}${short}`, look: "chosen", more };
}

function outcomeAlone(event) {
  const more = comparison([["predicted", event.data.predicted.ttft_s, "chosen"], ["measured", event.data.measured.ttft_s, "measured"]], "first token");
  return { what: `What became of ${event.data.action} ${event.data.groups ?? ""}`.trim(), why: event.why, more };
}

function comparison(rows, title) {
  const box = make("div", "compare"), most = Math.max(...rows.map(([, v]) => v), 1e-9);
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", title);
  for (const [name, value, look] of rows) {
    const track = make("span", "track"), fill = make("span", look);
    fill.style.width = `${(value / most) * 100}%`;
    track.append(fill);
    box.append(make("span", look ? "ink" : "", name), track, make("span", "", seconds(value)));
  }
  return box;
}

// Steering ------------------------------------------------------------------------------------------------------------

let shownInstance = 0;

async function ask(method, path, body) { // the server takes a cookie with JSON of its own page alone
  const answer = await fetch(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (answer.ok) return "";
  const error = await answer.json().catch(() => null);
  return error?.error?.message ?? `The server answered ${answer.status}.`;
}

$("open-layout").addEventListener("click", () => {
  const names = $("layout-names"), shapes = new Set(["dp", ...(view?.formable ?? []).map((name) => name.split("@")[0])]);
  names.replaceChildren(...[...shapes, ...(view?.formable ?? [])].map((name) => { const o = make("option"); o.value = name; return o; }));
  put("layout-error", "");
  $("layout-dialog").showModal();
});
$("layout-set").addEventListener("click", async () => {
  const layout = $("layout-text").value.trim();
  const why = layout ? await ask("PUT", "/cluster/layout", { layout, strategy: $("layout-strategy").value }) : "Write a layout, such as dp or tp2.";
  put("layout-error", why);
  if (!why) $("layout-dialog").close();
});
$("layout-auto").addEventListener("click", async () => {
  const why = await ask("PUT", "/cluster/layout", { layout: "auto" });
  put("layout-error", why);
  if (!why) $("layout-dialog").close();
});
$("layout-text").addEventListener("keydown", (e) => { if (e.key === "Enter") { e.preventDefault(); $("layout-set").click(); } });

function openInstance(id) {
  shownInstance = id;
  put("drain-error", "");
  $("drain-confirm").hidden = true;
  put("drain", "Drain it");
  drawFacts();
  $("instance-dialog").showModal();
}

function drawFacts() {
  const i = view.instances[shownInstance];
  if (!i) { $("instance-dialog").close(); return; }
  put("instance-title", `Instance ${shownInstance}`);
  const facts = {
    state: i.state + (i.phase ? `: ${i.phase}` : ""), life: i.key, shape: i.leader === shownInstance ? i.shape : `${i.shape}, with ${i.leader}`,
    place: `${i.device} on ${i.node}, process ${i.pid || "–"}`, weights: bytes(i.weights), KV: `${bytes(i.kv_used)} of ${bytes(i.kv)}`,
    "KV tokens": i.kv_tokens_total ? `${number(i.kv_tokens)} of ${number(i.kv_tokens_total)}` : "as its leader's",
    ...(i.host ? { host: `${bytes(i.host_used)} of ${bytes(i.host)}` } : {}),
    requests: `${i.running} running, ${i.waiting} waiting, ${i.parked} parked, ${i.paused} paused`, "moved away": number(i.moved), preempted: number(i.preempted),
    tokens: `${number(i.prompt_tokens)} of prompts, ${number(i.output_tokens)} of answers`, ...(i.failure ? { failure: i.failure } : {}),
  };
  const list = $("instance-facts");
  if (list.children.length !== 2 * Object.keys(facts).length) list.replaceChildren(...Object.keys(facts).flatMap((name) => [make("dt", "", name), make("dd")]));
  Object.entries(facts).forEach(([name, text], n) => { write(list.children[2 * n], name); write(list.children[2 * n + 1], text); });
  const held = i.state === "dead" || i.state === "draining";
  if ($("drain-confirm").hidden) put("drain", held ? "Start it again" : "Drain it");
}

$("drain").addEventListener("click", async () => {
  const i = view.instances[shownInstance], back = i.state === "dead" || i.state === "draining";
  if ($("drain-confirm").hidden && !back) {
    put("drain-question", `Instance ${shownInstance} takes no new requests. Its ${plural(i.running, "running request")} go on at other instances, and its slot stays empty until it is started again.`);
    $("drain-confirm").hidden = false;
    put("drain", "Yes, drain it");
    $("drain-seconds").focus();
    return;
  }
  const path = `/cluster/instances/${shownInstance}/${back ? "undrain" : "drain"}`;
  const why = await ask("POST", path, back ? {} : { timeout_s: Number($("drain-seconds").value) });
  put("drain-error", why);
  if (!why) $("instance-dialog").close();
});

// Dark and light ------------------------------------------------------------------------------------------------------

const darkly = matchMedia("(prefers-color-scheme: dark)");
function theme(chosen) {
  if (chosen) document.documentElement.dataset.theme = chosen;
  document.documentElement.dataset.shown = chosen || (darkly.matches ? "dark" : "light");
  if (view) draw();
}
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.shown === "dark" ? "light" : "dark";
  try { localStorage.setItem("pengserve-theme", next); } catch { /* a browser that keeps nothing */ }
  theme(next);
});
darkly.addEventListener("change", () => theme(document.documentElement.dataset.theme));
addEventListener("resize", () => { if (view) requestAnimationFrame(draw); });
let kept = null;
try { kept = localStorage.getItem("pengserve-theme"); } catch { /* a browser that keeps nothing */ }
theme(kept);
connect();


"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
const taken = new Uint16Array(bytes(data.taken));        // [layers shown, heads, tokens shown]
const ranges = new Uint16Array(bytes(data.ranges));      // the same, as half floats
const evictedAt = new Int32Array(bytes(data.evicted_at)); // [layers shown, evictions]
const ids = new Int32Array(bytes(data.ids));
const { layers, heads, first, prompt, seen } = data;
const pairs = layers.length * heads, tokens = ids.length;
const [PREFILL, DROPPED, LIVE] = [0, 65534, 65535];
const columns = evictedAt.length / layers.length;
const get = (id) => document.getElementById(id);
const svg = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return node;
};
const spans = [...document.querySelectorAll(".text > span")];
const inside = seen - first;  // tokens shown that the ring has read
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

// How many tokens had been read when a pair lost a token; beyond the end where it did not.
const left = Int32Array.from(taken, (mark, at) => {
  if (mark === LIVE) return seen + 1;
  if (mark === PREFILL || mark === DROPPED) return prompt;
  return evictedAt[Math.floor(at / (heads * inside)) * columns + mark - 1];
});
const times = [...new Set(evictedAt)].filter((n) => n > 0).sort((a, b) => a - b);
const state = { t: seen, pinned: -1, hovered: -1 };

// A half float; what is smaller than 0.0001 would be shown as 0 anyway.
function half(bits) {
  const exponent = (bits >> 10) & 31;
  return exponent ? 2 ** (exponent - 15) * (1 + (bits & 1023) / 1024) : 0;
}

function holders(token) {
  let n = 0;
  for (let at = token; at < left.length; at += inside) n += left[at] > state.t;
  return n;
}

function label(token) {
  const span = spans[token], text = span.dataset.name || span.textContent;
  return text ? JSON.stringify(text) : "part of the next character";
}

// What is known of a token: [name, value] rows.
function facts(token) {
  const position = first + token;
  const rows = [["token", `${label(token)} (${ids[token]})`], ["position", `${position}, ${position < prompt ? "prompt" : "answer"}`]];
  if (token >= inside) return [...rows, ["in the ring", "never: it was drawn last and not read"]];
  const marks = { dropped: 0, prefill: 0, live: 0, gone: 0 };
  let low = Infinity, high = 0, sum = 0, from = Infinity, to = 0;
  for (let at = token; at < left.length; at += inside) {
    const value = half(ranges[at]), mark = taken[at];
    low = Math.min(low, value), high = Math.max(high, value), sum += value;
    marks[mark === LIVE ? "live" : mark === DROPPED ? "dropped" : mark === PREFILL ? "prefill" : "gone"] += 1;
    if (mark > PREFILL && mark < DROPPED) from = Math.min(from, left[at]), to = Math.max(to, left[at]);
  }
  rows.push(["held by", position < state.t ? `${holders(token)} of ${pairs} pairs` : "not read yet"]);
  rows.push(["value range", `${(sum / pairs).toFixed(2)} (${low.toFixed(2)} to ${high.toFixed(2)})`]);
  if (marks.dropped) rows.push(["not let in", `${count(marks.dropped, "pair")}, by retention`]);
  if (marks.prefill) rows.push(["taken", `${count(marks.prefill, "pair")}, at prefill`]);
  if (marks.gone) rows.push(["evicted", `${count(marks.gone, "pair")}, after ${from === to ? "" : `${from} to `}${to} tokens`]);
  rows.push(["at the end", `live in ${marks.live} of ${pairs}`]);
  return rows;
}

function shade() {
  const share = new Float32Array(inside);
  for (let at = 0; at < left.length; at += inside)
    for (let token = 0; token < inside; token++) share[token] += left[at + token] > state.t;
  for (let token = 0; token < spans.length; token++) {
    const later = first + token >= state.t, value = later ? 0 : Math.round((share[token] / pairs) * 50) / 50;
    const span = spans[token], kind = token >= inside ? "unread" : later ? "later" : share[token] ? "here" : "gone";
    if (span.kind !== kind) {
      span.classList.remove(span.kind);
      span.classList.add(span.kind = kind);
    }
    if (span.value !== value) span.style.setProperty("--s", span.value = value);
  }
}

function describe() {
  const token = state.hovered >= 0 ? state.hovered : state.pinned;
  const rows = token >= 0 ? facts(token) : overall();
  get("chosen").textContent = token >= 0 ? "Token" : "All tokens";
  get("details").replaceChildren(...rows.flatMap(([name, value]) => {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = name, dd.textContent = value;
    return [dt, dd];
  }));
  drawMap(token);
}

function overall() {
  let live = 0, whole = 0;
  for (let token = 0; token < Math.min(inside, state.t - first); token++) {
    const n = holders(token);
    live += n > 0, whole += n === pairs;
  }
  const read = Math.min(inside, state.t - first);
  return [["read", count(state.t, "token")], ["held somewhere", `${live} of ${count(read, "token")}`],
    ["held everywhere", count(whole, "token")], ["hint", "Point at a token, or press the arrow keys in the text."]];
}

const cells = [];
function buildMap() {
  const map = get("map"), size = 10, wide = layers.length >= heads;
  map.setAttribute("viewBox", wide ? `0 0 ${layers.length * size} ${heads * size}` : `0 0 ${heads * size} ${layers.length * size}`);
  for (let layer = 0; layer < layers.length; layer++)
    for (let head = 0; head < heads; head++) {
      const [x, y] = wide ? [layer, head] : [head, layer];
      const rect = svg("rect", { x: x * size, y: y * size, width: size - 1, height: size - 1, rx: 1 });
      rect.addEventListener("pointerenter", () => { get("cell").textContent = cellText(layer, head); });
      rect.addEventListener("pointerleave", () => { get("cell").textContent = caption(); });
      map.append(rect);
      cells.push(rect);
    }
}

const current = () => (state.hovered >= 0 ? state.hovered : state.pinned);
const promptShown = () => Math.max(0, prompt - first);

function promptHeld(pair) {
  let n = 0;
  for (let token = 0; token < promptShown(); token++) n += left[pair * inside + token] > state.t;
  return n;
}

function caption() {
  const token = current();
  const axes = layers.length >= heads ? "Columns are layers, rows are KV heads." : "Rows are layers, columns are KV heads.";
  if (token < 0) return promptShown() ? `The share of the prompt that each still holds. ${axes}` : axes;
  if (token >= inside || first + token >= state.t) return `Not read yet. ${axes}`;
  return `${holders(token)} of ${pairs} hold it. ${axes}`;
}

function cellText(layer, head) {
  const token = current(), pair = layer * heads + head, at = pair * inside + token, name = `Layer ${layers[layer]}, head ${head}: `;
  if (token < 0) return `${name}holds ${promptHeld(pair)} of ${count(promptShown(), "prompt token")}.`;
  if (token >= inside) return `${name}never read it.`;
  const value = `value range ${half(ranges[at]).toFixed(3)}.`, mark = taken[at];
  if (mark === LIVE) return `${name}live at the end; ${value}`;
  if (mark === DROPPED) return `${name}retention did not let it in; ${value}`;
  if (mark === PREFILL) return `${name}taken at prefill; ${value}`;
  return `${name}evicted by its eviction ${mark}, after ${left[at]} tokens; ${value}`;
}

function drawMap(token) {
  cells.forEach((rect, pair) => {
    const at = pair * inside + token;
    let kind = "held", opacity = 1;
    if (token < 0) opacity = promptShown() ? 0.08 + 0.92 * (promptHeld(pair) / promptShown()) : 0.5;
    else if (token >= inside || first + token >= state.t) kind = "absent";
    else if (left[at] <= state.t) kind = taken[at] === DROPPED ? "dropped" : "out";
    rect.setAttribute("class", kind);
    rect.setAttribute("opacity", opacity.toFixed(3));
  });
  get("kinds").hidden = token < 0;
  get("cell").textContent = caption();
  get("map").setAttribute("aria-label", caption());
}

const bins = Math.min(Math.max(inside, 1), 1500);
function drawStrip() {
  const canvas = get("strip"), context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const [r, g, b] = style.getPropertyValue("--heat").trim().split(" ").map(Number);
  canvas.width = bins, canvas.height = layers.length;
  const image = context.createImageData(bins, layers.length);
  const total = new Float32Array(bins), sum = new Float32Array(bins);
  for (let layer = 0; layer < layers.length; layer++) {
    total.fill(0), sum.fill(0);
    for (let token = 0; token < Math.min(inside, state.t - first); token++) {
      const bin = Math.floor((token * bins) / inside);
      total[bin] += heads;
      for (let head = 0; head < heads; head++) sum[bin] += left[(layer * heads + head) * inside + token] > state.t;
    }
    for (let bin = 0; bin < bins; bin++)
      image.data.set([r, g, b, total[bin] ? 255 * (sum[bin] / total[bin]) : 0], 4 * (layer * bins + bin));
  }
  context.putImageData(image, 0, 0);
}

function render() {
  const past = times.filter((n) => n <= state.t).length;
  get("now").textContent = `${state.t.toLocaleString("en")} of ${seen.toLocaleString("en")}`;
  get("summary").textContent = state.t === prompt ? "right after the prompt" : `${past} of ${count(times.length, "eviction step")} done`;
  get("time").setAttribute("aria-valuetext", `${state.t} tokens read, ${past} eviction steps`);
  shade(), describe(), drawStrip();
  document.body.dataset.state = `t=${state.t}&token=${state.pinned < 0 ? "" : first + state.pinned}`;
}

function choose(token) {
  if (state.pinned >= 0) spans[state.pinned].classList.remove("chosen");
  state.pinned = token >= 0 && token < spans.length ? token : -1;
  if (state.pinned >= 0) spans[state.pinned].classList.add("chosen");
  describe(), remember();
}

let writing = 0;
function remember() {
  document.body.dataset.state = `t=${state.t}&token=${state.pinned < 0 ? "" : first + state.pinned}`;
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", `#${document.body.dataset.state}`), 250);
}

function goTo(t) {
  get("time").value = t;
  get("time").dispatchEvent(new Event("input"));
}

// The address says where to begin: #t=200&token=12
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("token")) {
    choose(Number(given.get("token")) - first);
    spans[state.pinned]?.scrollIntoView({ block: "nearest" });
  }
  if (Number(given.get("t")) > 0) goTo(given.get("t"));
}

function tooltip(text, x, y) {
  const tip = get("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(x + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18}px`;
}

function hover(token, event) {
  if (token === state.hovered) return;
  state.hovered = token;
  describe();
  tooltip(token < 0 ? "" : facts(token).map((row) => row.join(": ")).join("\n"), event.clientX, event.clientY);
}

let playing = 0;
function play(now, before, exact) {
  const t = exact + ((now - before) / 9000) * (seen - prompt);
  if (t >= seen) { goTo(seen); stop(); return; }
  goTo(Math.floor(t));
  playing = requestAnimationFrame((next) => play(next, now, t));
}
function stop() {
  cancelAnimationFrame(playing);
  playing = 0;
  get("play").textContent = "Play";
  get("play").setAttribute("aria-pressed", "false");
}

get("time").addEventListener("input", () => { state.t = Number(get("time").value); render(); remember(); });
get("prev").addEventListener("click", () => goTo(times.filter((n) => n < state.t).pop() ?? prompt));
get("next").addEventListener("click", () => goTo(times.find((n) => n > state.t) ?? seen));
get("play").addEventListener("click", () => {
  if (playing) { stop(); return; }
  get("play").textContent = "Pause";
  get("play").setAttribute("aria-pressed", "true");
  const start = state.t >= seen ? prompt : state.t;
  playing = requestAnimationFrame((now) => play(now, now, start));
});
const index = new Map(spans.map((span, token) => [span, token]));
get("text").addEventListener("pointermove", (event) => hover(index.get(event.target) ?? -1, event));
get("text").addEventListener("pointerleave", (event) => hover(-1, event));
get("text").addEventListener("click", (event) => {
  const token = index.get(event.target) ?? -1;
  choose(token === state.pinned ? -1 : token);
});
get("text").addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: state.pinned - 1, ArrowRight: state.pinned + 1, Home: 0, End: spans.length - 1, Escape: -1 };
  if (!(event.key in moves)) return;
  event.preventDefault();
  choose(event.key === "Escape" ? -1 : Math.min(Math.max(moves[event.key], 0), spans.length - 1));
  if (state.pinned >= 0) spans[state.pinned].scrollIntoView({ block: "nearest" });
});
const under = (event) => Math.min(inside - 1, Math.floor((event.offsetX / get("strip").clientWidth) * inside));
get("strip").addEventListener("pointermove", (event) => hover(under(event), event));
get("strip").addEventListener("pointerleave", (event) => hover(-1, event));
get("strip").addEventListener("click", (event) => choose(under(event)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawStrip);
addEventListener("hashchange", fromAddress);

const ticks = new Set(times.map((n) => Math.round(((n - prompt) / Math.max(1, seen - prompt)) * 1000)));
get("ticks").append(...[...ticks].map((x) => svg("rect", { x, y: 0, width: 1.5, height: 6 })));
buildMap();
render();
fromAddress();
document.body.dataset.ready = "yes";

// What the sections of the page share: the policies, tokens that can be looked into, and charts.

const stored = JSON.parse(document.getElementById("data").textContent);
const { cfg } = stored;
const { base, trained } = unpack(stored.packed, cfg);

// The policies by name. The reader's own joins them as "yours", once it has learned a step.
const policies = { base, trained };
const yours = { optimizer: null, steps: 0, from: "base" };

const G = 8;                                            // answers in a group
const THINK = 256 + cfg.specialTokens.indexOf("<think>");
const mayMove = !matchMedia("(prefers-reduced-motion: reduce)").matches;

// ---- elements --------------------------------------------------------------------------------

function byId(id) {
  return document.getElementById(id);
}

// A new element. Strings among its children become text nodes: what a policy has written enters the
// page like this or by append, never as markup. Children that are null are left out.
function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text"].includes(tag);
  const namespace = isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

// The same with variables for its style, which its class uses.
function styled(node, variables) {
  for (const [name, value] of Object.entries(variables)) node.style.setProperty(name, value);
  return node;
}

function fillSelect(select, names, chosen) {
  const options = names.map((name) => element("option", { value: name }, name));
  select.replaceChildren(...options);
  select.value = chosen;
}

function signed(x, digits = 2) {
  const sign = x > 0 ? "+" : x < 0 ? "−" : "";
  return sign + Math.abs(x).toFixed(digits);
}

function percent(p) {
  if (p > 0 && p < 0.001) return "< 0.1%";
  const nearAnEnd = p > 0 && p < 0.0995 || p > 0.99 && p < 0.9995;
  return (100 * p).toFixed(nearAnEnd ? 1 : 0) + "%";
}

// For those who listen: what has changed on the page, apart from what they are reading.
function say(text) {
  byId("said").textContent = text;
}

// ---- what is going on ------------------------------------------------------------------------

let activity = null;    // "training", "counting", or null; one at a time, since both take a while
let isStopping = false; // it has been asked to stop, and will after the step that is under way

function begin(name) {
  activity = name;
  isStopping = false;
  showButtons();
}

function stop() {
  isStopping = true;
  showButtons();
}

// The button that was pressed to stop was disabled until now, which loses the focus in Firefox.
function end() {
  const button = byId(activity === "training" ? "train-button" : "count");
  const wasLost = document.activeElement === document.body;
  activity = null;
  showButtons();
  if (wasLost) button.focus({ preventScroll: true });
}

// What can be pressed now, and what it is called.
function showButtons() {
  const isIdle = activity === null;
  byId("learn").disabled = !isIdle || !hasSignal(group.rewards) || group.changes !== null;
  byId("learn").textContent = learnLabel();
  byId("train-button").disabled = isStopping && !isIdle || activity === "counting";
  byId("train-button").textContent =
    activity === "training" ? "Pause" : log.length > 0 ? "Go on" : "Train";
  byId("start-over").disabled = !isIdle;
  byId("count").disabled = isStopping && !isIdle || activity === "training";
  byId("count").textContent =
    activity === "counting" ? "Stop" : counts.base ? "Sample 25 more" : "Sample 25 problems";
  byId("count-anew").disabled = !isIdle || !counts.base;
}

// ---- time ------------------------------------------------------------------------------------

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

// Let the browser draw and listen. A message is not held back in a tab that is not looked at, as
// timers are.
function breathe() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

// ---- tokens ----------------------------------------------------------------------------------

function tokenLabel(id) {
  if (id >= 256) return cfg.specialTokens[id - 256] ?? `token ${id}`;
  if (id === 32) return "␣";
  return id > 32 && id < 127 ? String.fromCharCode(id) : "\\x" + id.toString(16).padStart(2, "0");
}

// A token as it stands on the page. next: what its policy predicted there; push: how hard it is
// pushed, of at most 1, and why; without it, the shade says how unlikely the token was.
function tokenElement(id, next, push = null) {
  const strength = push ? Math.sqrt(Math.abs(push.share)) : 1 - next.p[id];
  const kind = push === null ? "unsure" : push.share > 0 ? "up" : "down";
  const classes = id >= 256 ? `${kind} tag` : kind;
  const node = element("span", { class: classes, tabindex: -1 }, tokenLabel(id));
  node.token = { id, next, why: push ? push.why : null };
  return styled(node, { "--strength": (0.75 * strength).toFixed(3) });
}

// The tokens of a completion that `tree` predicted. label: what is read out; pushes: of each token,
// or null
function tokenLine(label, tree, { tokens, nodes }, pushes = null) {
  const line = emptyLine(label);
  tokens.forEach((id, t) => {
    addToken(line, tokenElement(id, tree.next[nodes[t]], pushes && pushes[t]));
  });
  return line;
}

function emptyLine(label) {
  const help = `${label}, tokens; the arrow keys go from one to the next`;
  return element("div", { class: "tokens", role: "group", "aria-label": help });
}

// The first token of a line is reached by the tab key, the others by arrow keys.
function addToken(line, node) {
  if (line.firstChild === null) node.tabIndex = 0;
  line.append(node);
}

// What else might have stood in the place of a token: the five likeliest, and itself.
function showTip(node) {
  const { id, next, why } = node.token;
  const byChance = Array.from(next.p.keys()).sort((a, b) => next.p[b] - next.p[a]);
  const shown = byChance.slice(0, 5);
  if (!shown.includes(id)) shown.push(id);
  const lines = shown.map((v) => element("div", { class: v === id ? "own" : "" },
    element("code", {}, tokenLabel(v)),
    styled(element("i"), { "--length": `${100 * next.p[v]}%` }),
    element("span", {}, percent(next.p[v]))));
  const notes = [`entropy ${next.entropy.toFixed(2)} nats`, why].filter((text) => text !== null);
  const tip = byId("tip");
  tip.replaceChildren(...lines, ...notes.map((text) => element("small", {}, text)));
  tip.hidden = false;
  node.setAttribute("aria-describedby", "tip");
  placeTip(tip, node.getBoundingClientRect());
}

// Below the token, or above it where there is more room, and inside the window.
function placeTip(tip, box) {
  const room = document.documentElement.clientWidth - tip.offsetWidth - 6;
  const left = Math.max(6, Math.min(box.left - 20, room));
  const fitsBelow = box.bottom + tip.offsetHeight + 12 < innerHeight;
  const isAbove = !fitsBelow && box.top > tip.offsetHeight + 12;
  const top = isAbove ? box.top - tip.offsetHeight - 7 : box.bottom + 7;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

function hideTip() {
  byId("tip").hidden = true;
  for (const node of document.querySelectorAll("[aria-describedby=tip]")) {
    node.removeAttribute("aria-describedby");
  }
}

for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, ({ target }) => {
    hideTip();
    if (target.token) showTip(target);
  });
}
document.addEventListener("focusout", hideTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const from = event.target;
  if (!from.token || event.altKey || event.ctrlKey || event.metaKey) return;
  const to = {
    ArrowRight: from.nextSibling, ArrowLeft: from.previousSibling,
    Home: from.parentNode.firstChild, End: from.parentNode.lastChild,
  }[event.key];
  if (!to) return;
  event.preventDefault();
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});

// ---- charts ----------------------------------------------------------------------------------

// Lines through points (x, y), each with its name and last value at its end. series: { name, kind
// (classes), points }; ticks: values of x and y that are written at the axes; toX: 0 .. 1 of an x
function chart(box, title, series, ticks, toX) {
  const width = Math.max(280, box.clientWidth || 500);
  const [height, left, right, bottom] = [230, 34, 118, 30];
  const highest = Math.max(...ticks.y);
  const x = (value) => left + (width - left - right) * toX(value);
  const y = (value) => 10 + (height - 10 - bottom) * (1 - value / highest);
  const drawn = series.filter(({ points }) => points.length > 0);

  const rulers = ticks.y.flatMap((value) => [
    element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    element("text", { x: 0, y: y(value) + 4 }, String(value))]);
  const feet = ticks.x.map((value) =>
    element("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, String(value)));
  const lines = drawn.map(({ kind, points }) => {
    const places = points.map((point) => `${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
    return element("path", { class: kind, d: "M" + places.join("L") });
  });

  // names, from the highest line downwards, each at least a line of text below the one before
  const byHeight = [...drawn].sort((a, b) => b.points.at(-1)[1] - a.points.at(-1)[1]);
  let limit = 0;
  const names = byHeight.map(({ name, kind, points }) => {
    const [lastX, lastY] = points.at(-1);
    const at = Math.max(y(lastY), limit);
    limit = at + 15;
    const value = highest > 1 ? lastY.toFixed(1) : lastY.toFixed(2);
    return element("text", { class: `label ${kind}`, x: x(lastX) + 7, y: at + 4 },
                   `${name} ${value}`);
  });
  const said = drawn.map(({ name, points }) => `${name} ${points.at(-1)[1].toFixed(2)}`);
  const label = `${title}: ${said.join(", ") || "nothing yet"}`;
  box.replaceChildren(element("svg", { viewBox: `0 0 ${width} ${height}`, width, height,
                                       role: "img", "aria-label": label },
                              rulers, feet, lines, names));
}

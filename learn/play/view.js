// What the parts of the page share: the policies, elements, and tokens with details.

const stored = JSON.parse(document.getElementById("data").textContent);
const { cfg } = stored;
const { base, trained } = unpack(stored.packed, cfg);

// The policies by name. The reader's own joins them as "yours".
const policies = { base, trained };

const mayMove = !matchMedia("(prefers-reduced-motion: reduce)").matches;

// ---- elements --------------------------------------------------------------------------------

function byId(id) {
  return document.getElementById(id);
}

// Make an element. Strings among its children become text nodes: a policy's text enters the page
// only in this way or by append, never as markup. Children that are null are left out.
function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text", "tspan", "circle", "g"].includes(tag);
  const namespace = isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

// Set the style variables of a node, which its class uses. -> the node
function styled(node, variables) {
  for (const [name, value] of Object.entries(variables)) node.style.setProperty(name, value);
  return node;
}

// Inside a chapter of the path, links replace the whole page.
if (location.search === "?figure") {
  document.body.className = "figure";
  document.head.append(element("base", { target: "_top" }));
}

const paper = (id) => `https://arxiv.org/abs/${id}`;

// What the texts mention, and where it is explained. A name that contains another comes first.
const LINKS = {
  "Dr. GRPO": paper("2503.20783"), "GRPO": "read/grpo.html", "PPO": "read/ppo.html",
  "GSPO": "read/gspo.html", "REINFORCE": "read/reinforce.html", "MaxRL": paper("2602.02710"),
  "DAPO": paper("2503.14476"), "CISPO": paper("2506.13585"), "AdamW": paper("1711.05101"),
  "rejection fine-tuning": paper("2308.01825"), "KL penalty": "path/08-kl.md",
};

// Put these links into a text. -> nodes
function linked(text) {
  return text.split(new RegExp(`(${Object.keys(LINKS).join("|")})`)).map((part) =>
    Object.hasOwn(LINKS, part) ? element("a", { href: LINKS[part] }, part) : part);
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

function plural(count, one, many = one + "s") {
  return `${count} ${count === 1 ? one : many}`;
}

// Announce to screen readers a change in another part of the page.
function say(text) {
  byId("announcement").textContent = text;
}

// ---- time ------------------------------------------------------------------------------------

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

// Let the browser draw and handle events. In a background tab the browser delays timers, but not
// messages, so this uses a message.
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
  if (id === cfg.EOS) return "end";
  if (id >= 256) return cfg.specialTokens[id - 256] ?? `token ${id}`;
  if (id === 32) return "␣";
  return id > 32 && id < 127 ? String.fromCharCode(id) : "\\x" + id.toString(16).padStart(2, "0");
}

// Add a token to a line. next: its policy's prediction there; change: { share: of the largest
// change of a probability, from -1 to 1, why }; without a change, the shade shows how unlikely the
// token was. The tab key reaches the first token of a line, and arrow keys reach the others. Lines
// may break after steps and tags, and otherwise after every ten tokens. -> the token's node
function addToken(line, id, next, change = null) {
  const strength = change ? Math.sqrt(Math.abs(change.share)) : 1 - next.p[id];
  const kind = change === null ? "unsure" : change.share > 0 ? "up" : "down";
  const tag = id === cfg.EOS ? " tag end" : id >= 256 ? " tag" : "";
  const tabindex = line.firstChild === null ? 0 : -1;
  const node = element("span", { class: kind + tag, tabindex }, tokenLabel(id));
  node.about = () => aboutToken(id, next, change);
  line.append(styled(node, { "--strength": (0.75 * strength).toFixed(3) }));
  line.unbroken = (line.unbroken ?? 0) + 1;
  if (id >= 256 || tokenLabel(id) === ";" || line.unbroken === 10) {
    line.append(element("wbr"));
    line.unbroken = 0;
  }
  return node;
}

function emptyLine(label) {
  const help = `${label}, tokens; the arrow keys go from one to the next`;
  return element("div", { class: "tokens", role: "group", "aria-label": help });
}

// Write an answer to a problem into a box, token by token, then the verdict.
async function writeAnswer(box, answer, { tree, completion: { tokens, nodes }, text }) {
  const line = emptyLine("answer");
  box.append(line);
  for (const [t, id] of tokens.entries()) {
    addToken(line, id, tree.next[nodes[t]]);
    if (mayMove) await pause(24);
  }
  showVerdict(box, verdictOf(answer, text));
  say(box.querySelector("figcaption").textContent);
}

// The verdict of the verifier on an answer, as an element.
function verdictOf(answer, text) {
  const given = extract(text) ?? "no answer";
  if (answer === null) return element("strong", { class: "verdict" }, "cannot be checked");
  const isRight = verify(answer, text) === 1;
  return element("strong", { class: `verdict ${isRight ? "right" : "wrong"}` },
                 `${isRight ? "✓" : "✗"} ${given}`);
}

// A box for an answer: a title, later the verdict, and the tokens.
function answerBox(title) {
  return element("figure", { class: "answer" },
                 element("figcaption", {}, element("span", {}, title)));
}

function showVerdict(box, verdict) {
  box.querySelector("figcaption > .verdict")?.remove();
  box.querySelector("figcaption").append(verdict);
}

// ---- tips ------------------------------------------------------------------------------------

// Show the tip of a node, which its function `about` returns. Nodes that have one show it when you
// point at them, tap them, or reach them by the keyboard.
function showTip(node) {
  const tip = byId("tip");
  tip.replaceChildren(...node.about());
  tip.hidden = false;
  node.setAttribute("aria-describedby", "tip");
  placeTip(tip, node.getBoundingClientRect());
}

// The tip of a token: the five most likely tokens in its place, and the token itself.
function aboutToken(id, next, change) {
  const sorted = Array.from(next.p.keys()).sort((a, b) => next.p[b] - next.p[a]);
  const shown = sorted.slice(0, 5);
  if (!shown.includes(id)) shown.push(id);
  const lines = shown.map((v) => element("div", { class: v === id ? "own" : "" },
    element("code", {}, tokenLabel(v)),
    styled(element("i"), { "--length": `${100 * next.p[v]}%` }),
    element("span", {}, percent(next.p[v]))));
  return [...lines, element("small", {}, change?.why ?? ""),
          element("small", {}, `entropy ${next.entropy.toFixed(2)} nats`)];
}

// Place a tip inside the window: below the token, or above it if it does not fit below.
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

// The focused node keeps its tip while the mouse is over nothing that has one. A finger may slide
// from one token to the next.
for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, ({ target }) => {
    const described = [target, document.activeElement].find((node) => node?.about);
    hideTip();
    if (described) showTip(described);
  });
}
document.addEventListener("focusout", hideTip);
document.addEventListener("pointerdown", ({ target, pointerId }) => {
  if (target.hasPointerCapture(pointerId)) target.releasePointerCapture(pointerId);
});

// Arrow keys go through the tokens of a line, and through the squares of a batch.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const from = event.target;
  const box = from.closest?.("[role=group]");
  if (!box || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...box.querySelectorAll("[tabindex]")];
  const at = all.indexOf(from);
  const last = all.length - 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
  if (at < 0 || to === undefined || to < 0 || to > last) return;
  event.preventDefault();
  from.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
});

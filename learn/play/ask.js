// A problem of one's own: what is outside the task is said before it runs.

const DOMAIN = "The task: five numbers from 1 to 9, with + − * and brackets from the left; no " +
  "value on the way outside 0 to 20.";

// What is in the field: whether it can be asked, and what is outside the task.
function checkTyped() {
  const prompt = normalized(byId("typed").value);
  const isEmpty = prompt === "=";
  const reasons = isEmpty ? [] : outside(prompt, cfg);
  byId("ask-button").disabled = isEmpty || isTooLong(prompt, cfg);
  byId("typed-note").classList.toggle("outside", reasons.length > 0);
  const kept = isHeldOut(prompt) ? "kept from training." : "of the kind that it was trained on.";
  byId("typed-note").textContent = isEmpty ? DOMAIN : reasons.length === 0 ?
    `Inside the task, and ${kept}` : `Outside the task. ${reasons.join(" ")} ${DOMAIN}`;
}

// A problem to press.
function chip(text) {
  const button = element("button", { type: "button", class: "chip" }, text);
  button.addEventListener("click", () => {
    byId("typed").value = text;
    checkTyped();
    askTyped();
  });
  return button;
}

// All policies answer what is in the field, with the same luck.
function askTyped() {
  const prompt = normalized(byId("typed").value);
  const answer = solve(prompt);
  const uniforms = byId("by-chance").checked ? uniformNumbers(cfg.T, Math.random) : null;
  const cards = Object.entries(policies).map(([name, policy]) => {
    const card = answerBox(nameOf(name));
    writeAnswer(card, answer, answerTo(policy, prompt, uniforms));
    return card;
  });
  byId("answers").replaceChildren(...cards);
  byId("asked").replaceChildren(element("code", {}, prompt),
    answer === null ? " nobody can check this." : ` The answer is ${answer}.`);
}

function nameOf(name) {
  if (name === "base") return "base";
  if (name === "trained") return `after ${stored.run.steps} steps of ${stored.run.script}`;
  return `yours: ${yoursIs}`;
}

byId("typed").addEventListener("input", checkTyped);
byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("ask-button").disabled) askTyped();
});
const inside = examProblems(4, cfg).slice(1).map(({ prompt }) => prompt.slice(0, -1));
byId("inside").append(...inside.map(chip));
byId("beyond").append(...["2+3", "17*23", "((((9*9)+1)-2)-3)"].map(chip));
checkTyped();

// ---- the page begins -------------------------------------------------------------------------

beginRun();
showButtons();
addEventListener("resize", () => {
  hideTip();
  showCurve();
});

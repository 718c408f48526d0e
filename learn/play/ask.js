// The reader's own problem. A note tells the reader beforehand what in it is outside the task.

const DOMAIN = "The task has five numbers from 1 to 9, with + − * and brackets from the left, " +
  "and no intermediate value is below 0 or above 20.";

// Check the problem in the field: whether it can be asked, and what in it is outside the task.
function checkTyped() {
  const prompt = normalized(byId("typed").value);
  const isEmpty = prompt === "=";
  const reasons = isEmpty ? [] : outside(prompt, cfg);
  byId("ask-button").disabled = isEmpty || isTooLong(prompt, cfg);
  byId("typed-note").classList.toggle("outside", reasons.length > 0);
  const kept = isHeldOut(prompt) ? "was kept from training." : "may have been used in training.";
  byId("typed-note").textContent = isEmpty ? DOMAIN : reasons.length === 0 ?
    `This problem is inside the task, and ${kept}` :
    `This problem is outside the task. ${reasons.join(" ")} ${DOMAIN}`;
}

// A button that asks a problem.
function chip(text) {
  const button = element("button", { type: "button", class: "chip" }, text);
  button.addEventListener("click", () => {
    byId("typed").value = text;
    checkTyped();
    askTyped();
  });
  return button;
}

// Let all policies answer the problem in the field, with the same random numbers.
function askTyped() {
  const prompt = normalized(byId("typed").value);
  const answer = solve(prompt);
  const uniforms = byId("at-random").checked ? uniformNumbers(cfg.T, Math.random) : null;
  const cards = Object.entries(policies).map(([name, policy]) => {
    const card = answerBox(nameOf(name));
    writeAnswer(card, answer, answerTo(policy, prompt, uniforms));
    return card;
  });
  byId("answers").replaceChildren(...cards);
  byId("asked").replaceChildren(element("code", {}, prompt),
    answer === null ? " The answer to this cannot be checked." : ` The answer is ${answer}.`);
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

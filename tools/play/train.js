// Train it yourself: the loop of main() in grpo.py, in slices between which the browser draws.

const ENOUGH = 0.98;    // stop when this share of the samples of five steps was right, as stop_at
let history = [];       // of each step: { reward, thinks, signal, length }

// ---- the loop --------------------------------------------------------------------------------

// One step: P problems and G answers to each, rewarded; the gradient of (5); AdamW. -> metrics
async function trainStep(P, method) {
  const start = performance.now();
  const policy = policies.yours;
  const gradient = zerosLike(policy);
  const groups = [];
  for (let i = 0; i < P; i++) {
    const { prompt, answer } = sampleProblem(Math.random, false, cfg);
    const tree = new Tree(policy);
    const uniforms = uniformNumbers(G * cfg.T, Math.random);
    const completions = finish(rollout(tree, Array(G).fill(prompt), uniforms));
    const rewards = completions.map((one) => verify(answer, completionText(one, cfg)));
    const A = advantages(rewards, method);
    backward(gradient, tree, completions, pushes(A, completions, method, cfg.T, P * G));
    groups.push({ prompt, tree, completions, rewards, A });
    await breathe();
  }
  const gradNorm = adamW(policy, gradient, yours.optimizer, cfg.learningRate);
  yours.steps += 1;

  const all = groups.flatMap(({ completions }) => completions);
  const seconds = (performance.now() - start) / 1000;
  const think = cfg.specialTokens.indexOf("<think>") + 256;
  return {
    reward: mean(groups.flatMap(({ rewards }) => rewards)),
    thinks: mean(all.map(({ tokens }) => Number(tokens.includes(think)))),
    signal: mean(groups.map(({ rewards }) => Number(hasSignal(rewards)))),
    length: mean(all.map(({ tokens }) => tokens.length)),
    gradNorm, seconds, speed: mean(all.map(({ tokens }) => tokens.length)) * all.length / seconds,
    example: groups.find(({ rewards }) => hasSignal(rewards)) ?? null,
  };
}

async function train() {
  const hasBegun = policies.yours !== undefined && yours.from === "base";
  if (!hasBegun) beginFrom("base");
  setTraining(true);
  let isDone = false;
  while (isTraining && !isDone) {
    const metrics = await trainStep(Number(byId("num-prompts").value), byId("train-method").value);
    history.push(metrics);
    showStep(metrics);
    const recent = history.slice(-5).map(({ reward }) => reward);
    isDone = recent.length === 5 && mean(recent) >= ENOUGH;
  }
  byId("train-button").disabled = true;
  if (isDone) await examine();
  setTraining(false);
  forgetCounts();
  answerAll();
  if (byId("group-policy").value === "yours") sampleGroup();
}

// While it trains, the same button pauses, and nothing else changes what is trained.
function setTraining(isOn) {
  isTraining = isOn;
  byId("train-button").textContent = isOn ? "Pause" : history.length ? "Go on" : "Train";
  byId("train-button").disabled = false;
  byId("start-over").disabled = isOn;
  showLearnButton();
}

// Make `yours` a copy of another policy, of which nothing is known yet.
function beginFrom(name) {
  policies.yours = copyOf(policies[name]);
  Object.assign(yours, { optimizer: newOptimizer(policies.yours), steps: 0, from: name });
  fillSelect(byId("group-policy"), Object.keys(policies), "yours");
  history = [];
  forgetCounts();
  showCurves();
  showIntroduction();
  byId("exam").hidden = true;
  byId("live-group").replaceChildren();
  byId("train-button").textContent = "Train";
}

function startOver() {
  beginFrom("base");
  pose(problem);
}

// ---- what is seen of it ----------------------------------------------------------------------

function showIntroduction() {
  byId("train-status").textContent = "One step: 8 groups of 8 answers. The base thinks in about " +
    "one answer of four, and is then nearly always right.";
}

function showStep({ reward, signal, length, gradNorm, seconds, speed, example }) {
  byId("train-status").textContent =
    `Step ${history.length}: ${percent(reward)} right, ${percent(signal)} of the groups have ` +
    `signal, ${length.toFixed(1)} tokens an answer, gradient norm ${gradNorm.toFixed(2)}. ` +
    `${seconds.toFixed(2)} s, ${Math.round(speed)} tokens a second.`;
  showCurves();
  showLiveAnswer();
  if (example !== null) showExtremes(example);
}

function showCurves() {
  const last = Math.max(40, history.length);
  const ticks = [0, Math.round(last / 2), last];
  const curve = (metric) => history.map((_, i) => {
    const recent = history.slice(Math.max(0, i - 2), i + 1);
    return [i + 1, mean(recent.map((step) => step[metric]))];
  });
  const shares = [
    { name: "right", kind: "yours", points: curve("reward") },
    { name: "think", kind: "trained dashed", points: curve("thinks") },
    { name: "signal", kind: "soft dotted", points: curve("signal") }];
  const lengths = [{ name: "tokens", kind: "yours", points: curve("length") }];
  const toX = (step) => step / last;
  chart(byId("share-chart"), "share of the answers, mean of three steps", shares,
        { x: ticks, y: [0, 0.5, 1] }, toX);
  chart(byId("length-chart"), "tokens an answer, mean of three steps", lengths,
        { x: ticks, y: [0, cfg.T / 2, cfg.T] }, toX);
}

// The likeliest answer of the reader's policy, or of the base as long as there is none.
function showLiveAnswer() {
  const tree = new Tree(policies.yours ?? base);
  const [completion] = finish(rollout(tree, [problem.prompt]));
  const isRight = verify(problem.answer, completionText(completion, cfg));
  const verdict = element("span", { class: isRight ? "good" : "bad" }, isRight ? " ✓" : " ✗");
  byId("live-answer").replaceChildren(
    element("small", {}, problem.prompt, problem.answer === null ? null : verdict),
    tokenLine(tree, completion));
}

function showExtremes(example) {
  const { prompt, tree, completions, A } = example;
  const pushed = tokenPushes(example, A, byId("train-method").value);
  const best = A.indexOf(Math.max(...A));
  const worst = A.indexOf(Math.min(...A));
  byId("live-group").replaceChildren(element("small", {}, prompt), ...[best, worst].map((i) =>
    tokenLine(tree, completions[i], pushed[i])));
}

// ---- the exam --------------------------------------------------------------------------------

const examScores = {};  // of base and trained policy, which stay as they are

// The first different held-out problems of a fixed sequence.
function examProblems(count) {
  const random = generator(1);
  const found = new Map();
  while (found.size < count) {
    const one = sampleProblem(random, true, cfg);
    found.set(one.prompt, one);
  }
  return [...found.values()];
}

// How many of 100 problems the likeliest answers of a policy solve.
async function score100(policy) {
  let right = 0;
  for (const { prompt, answer } of examProblems(100)) {
    const [completion] = finish(rollout(new Tree(policy), [prompt]));
    right += verify(answer, completionText(completion, cfg));
    await breathe();
  }
  return right;
}

async function examine() {
  byId("train-status").append(` The last five steps were ${percent(ENOUGH)} right: enough. Now the exam …`);
  examScores.base ??= await score100(base);
  examScores.trained ??= await score100(trained);
  examScores.yours = await score100(policies.yours);
  const rows = Object.entries(examScores).map(([name, right]) => element("tr", {},
    element("th", { class: `dot ${name}`, scope: "row" }, name),
    element("td", {}, `${right} of 100 right`)));
  byId("exam").replaceChildren(byId("exam").caption, element("tbody", {}, rows));
  byId("exam").hidden = false;
  byId("train-status").append(` ${examScores.yours} of 100 right. Ask it, at the top of the page.`);
}

fillSelect(byId("train-method"), Object.keys(METHODS), "GRPO");
byId("train-button").addEventListener("click", () => {
  if (isTraining) {
    isTraining = false;                                 // after the step that is under way
    byId("train-button").disabled = true;
  } else {
    train();
  }
});
byId("start-over").addEventListener("click", startOver);

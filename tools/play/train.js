// Train it yourself: the loop of main() in grpo.py, in slices between which the browser draws.

const ENOUGH = 0.97;    // as stop_at: stop when this share of the answers was right
const RECENT = 10;      // of so many steps
let log = [];           // what trainStep returns, of each step

// ---- the loop --------------------------------------------------------------------------------

// One step: P problems and G answers to each, rewarded; the gradient of (5); AdamW. -> metrics, and
// a group as an example, or null if none has signal
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
    groups.push({ prompt, tree, completions, rewards, A, method });
    await breathe();
  }
  const gradNorm = adamW(policy, gradient, yours.optimizer, cfg.learningRate);
  yours.steps += 1;

  const all = groups.flatMap(({ completions }) => completions);
  const withSignal = groups.filter(({ rewards }) => hasSignal(rewards));
  return {
    reward: mean(groups.flatMap(({ rewards }) => rewards)),
    thinks: mean(all.map(({ tokens }) => Number(tokens.includes(THINK)))),
    signal: withSignal.length / P,
    length: mean(all.map(({ tokens }) => tokens.length)),
    numTokens: all.flatMap(({ tokens }) => tokens).length,
    gradNorm,
    seconds: (performance.now() - start) / 1000,
    example: withSignal[0] ?? null,
  };
}

async function train() {
  if (log.length === 0) beginFrom("base");
  const first = log.length;
  byId("exam").hidden = true;
  begin("training");
  let isDone = false;
  while (!isStopping && !isDone) {
    const metrics = await trainStep(Number(byId("num-prompts").value), byId("train-method").value);
    log.push(metrics);
    showStep(metrics);
    const rewards = log.slice(first).slice(-RECENT).map(({ reward }) => reward);
    isDone = rewards.length === RECENT && mean(rewards) >= ENOUGH;
  }
  stop();
  if (isDone) {
    await examine();
  } else {
    say(`Paused after step ${log.length}.`);
  }
  end();
  forgetCounts();
  answerAll();
  if (byId("group-policy").value === "yours") sampleGroup();
}

// Make `yours` a copy of another policy, of which nothing is known yet.
function beginFrom(name) {
  policies.yours = copyOf(policies[name]);
  Object.assign(yours, { optimizer: newOptimizer(policies.yours), steps: 0, from: name });
  fillSelect(byId("group-policy"), Object.keys(policies), "yours");
  log = [];
  forgetCounts();
  showCurves();
  showIntroduction();
  byId("exam").hidden = true;
  byId("live-group").replaceChildren("They come with the first step.");
}

function startOver() {
  beginFrom("base");
  pose(problem);
}

// ---- what is seen of it ----------------------------------------------------------------------

function showIntroduction() {
  byId("train-status").textContent = `One step: ${byId("num-prompts").value} groups of ${G} ` +
    "answers. At first, few of them think; watch those become more.";
}

function showStep({ reward, signal, length, numTokens, gradNorm, seconds, example }) {
  byId("train-status").textContent =
    `Step ${log.length}: ${percent(reward)} right, ${percent(signal)} of the groups have ` +
    `signal, ${length.toFixed(1)} tokens an answer, gradient norm ${gradNorm.toFixed(2)}. ` +
    `${seconds.toFixed(2)} s, ${Math.round(numTokens / seconds)} tokens a second.`;
  showCurves();
  showLiveAnswer();
  if (example !== null) showExtremes(example);
}

function showCurves() {
  const last = Math.max(40, log.length);
  const ticks = [0, Math.round(last / 2), last];
  const curve = (metric) => log.map((_, i) => {
    const recent = log.slice(Math.max(0, i - 2), i + 1);
    return [i + 1, mean(recent.map((step) => step[metric]))];
  });
  const shares = [
    { name: "right", kind: "yours", points: curve("reward") },
    { name: "think", kind: "ink dashed", points: curve("thinks") },
    { name: "signal", kind: "soft dotted", points: curve("signal") }];
  const lengths = [{ name: "tokens", kind: "yours", points: curve("length") }];
  const toX = (step) => step / last;
  chart(byId("share-chart"), "shares, mean of three steps", shares,
        { x: ticks, y: [0, 0.5, 1] }, toX);
  chart(byId("length-chart"), "tokens an answer, mean of three steps", lengths,
        { x: ticks, y: [0, cfg.T / 2, cfg.T] }, toX);
}

// The greedy answer of the reader's policy, or of the base as long as there is none.
function showLiveAnswer() {
  const tree = new Tree(policies.yours ?? base);
  const [completion] = finish(rollout(tree, [problem.prompt]));
  const isRight = verify(problem.answer, completionText(completion, cfg));
  const verdict = element("span", { class: isRight ? "good" : "bad" }, isRight ? " ✓" : " ✗");
  byId("live-answer").replaceChildren(
    element("small", {}, problem.prompt, problem.answer === null ? null : verdict),
    tokenLine("greedy answer", tree, completion));
}

// The best and the worst answer of a group, or the first ones of several.
function showExtremes(example) {
  const { prompt, tree, completions, rewards, A, method } = example;
  const pushed = tokenPushes(example, A, method);
  const best = A.indexOf(Math.max(...A));
  const worst = A.indexOf(Math.min(...A));
  const lines = [best, worst].map((i) => element("div", { class: "extreme" },
    rewardMark(rewards[i]), element("span", { class: "number" }, signed(A[i])),
    tokenLine(i === best ? "best answer" : "worst answer", tree, completions[i], pushed[i])));
  byId("live-group").replaceChildren(element("small", {}, prompt), ...lines);
}

// ---- the exam --------------------------------------------------------------------------------

const examScores = {};  // of base and trained policy, which stay as they are, and of yours

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

// How many of 100 problems the greedy answers of a policy solve.
async function examScore(policy) {
  let right = 0;
  for (const { prompt, answer } of examProblems(100)) {
    const [completion] = finish(rollout(new Tree(policy), [prompt]));
    right += verify(answer, completionText(completion, cfg));
    await breathe();
  }
  return right;
}

async function examine() {
  byId("train-status").append(` Of the last ${RECENT} steps, at least ${percent(ENOUGH)} was ` +
                              "right: enough. Now the exam …");
  examScores.base ??= await examScore(base);
  examScores.trained ??= await examScore(trained);
  examScores.yours = await examScore(policies.yours);
  const rows = Object.entries(examScores).map(([name, right]) => element("tr", {},
    element("th", { class: `dot ${name}`, scope: "row" }, name),
    element("td", {}, `${right} of 100 right`)));
  byId("exam").replaceChildren(byId("exam").caption, element("tbody", {}, rows));
  byId("exam").hidden = false;
  const result = `${examScores.yours} of 100 right.`;
  byId("train-status").append(` ${result} Ask it, at the top of the page.`);
  say(`Trained in ${log.length} steps. In the exam, ${result}`);
}

fillSelect(byId("train-method"), Object.keys(METHODS), "GRPO");
byId("train-button").addEventListener("click", () => {
  if (activity === "training") {
    stop();
  } else {
    train();
  }
});
byId("start-over").addEventListener("click", startOver);
byId("num-prompts").addEventListener("change", () => {
  if (log.length === 0) showIntroduction();
});

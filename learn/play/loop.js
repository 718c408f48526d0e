// main() of grpo.py: the settings, one step, its events, and when a run ends. This file does not
// use the page.

const LIMIT = 60;       // most steps of a run
const ENOUGH = 0.9;     // stop when this share of the answers was right
const RECENT = 8;       // over this many steps
const SILENT = 10;      // or stop when this many steps in a row had no signal at all
const BATCH = 64;       // answers per step
const MANY = 4;         // updates per batch, unless there is only one
const EXAM_SEED = 1;
const EXAM_SIZE = 100;

// ---- what can be set -------------------------------------------------------------------------

// The first option of each setting is the default. Each option has three texts: its value in an
// address, its name in a list, and its name in a label.
const SETTINGS = {
  reward: { title: "reward for", options: [
    ["right", "right answers", "right"],
    ["length", "long answers", "rewards length"],
    ["wrong", "wrong answers", "rewards wrong answers"],
    ["bug", "right answers, and any that begin with 1", "verifier bug"]] },
  baseline: { title: "baseline", options: [
    ["mean", "the group’s mean", "mean"],
    ["0", "0: only right answers count", "only right"],
    ["1", "1: only wrong answers count", "only wrong"],
    ["-1", "−1: all answers are pushed up", "all up"]] },
  group: { title: "group of", options: [["8", "8", "8"], ["2", "2", "group of 2"]] },
  temperature: { title: "temperature", options: [
    ["1", "1", "1"], ["0.2", "0.2", "temp. 0.2"], ["2", "2", "temp. 2"]] },
  rate: { title: "learning rate", options: [
    ["1", "× 1", "1"], ...["0.25", "0.5", "2", "4", "10"].map((factor) =>
      [factor, `× ${factor}`, `rate × ${factor}`])] },
  updates: { title: "updates per batch", options: [
    ["1", "1", "1"], ["4", "4", "4 updates"], ["free", "4, not clipped", "4 updates, no clip"]] },
  method: { title: "method", options: Object.keys(METHODS).map((name) => [name, name, name]) },
  seed: { title: "seed", options: Array.from({ length: 99 }, (_, i) =>
    [String(i + 1), String(i + 1), `seed ${i + 1}`]) },
};

const USUAL = Object.fromEntries(Object.entries(SETTINGS).map(([key, { options }]) =>
  [key, options[0][0]]));

// The part of an address after its #, which holds the settings that are not the usual ones.
function addressOf(settings) {
  const changed = Object.entries(settings).filter(([key, value]) => value !== USUAL[key]);
  return new URLSearchParams(changed).toString();
}

// The settings in an address. Anything unknown in it is ignored.
function settingsOf(address) {
  const settings = { ...USUAL };
  for (const [key, value] of new URLSearchParams(address.replace(/^#/, ""))) {
    const setting = Object.hasOwn(SETTINGS, key) ? SETTINGS[key] : { options: [] };
    if (setting.options.some((option) => option[0] === value)) settings[key] = value;
  }
  return settings;
}

// A short label of the settings: what distinguishes them from the usual ones.
function labelOf(settings) {
  const words = Object.entries(settings).filter(([key, value]) => value !== USUAL[key]).map(
    ([key, value]) => SETTINGS[key].options.find((option) => option[0] === value)[2]);
  const isPlain = settings.seed === USUAL.seed ? words.length === 0 : words.length === 1;
  return [...(isPlain ? [settings.method] : []), ...words].join(", ");
}

// The command that trains with these settings in Python, or null if no script has their reward or
// baseline.
function commandOf({ reward, baseline, group, temperature, rate, updates, method }, cfg) {
  if (reward !== "right" || baseline !== "mean") return null;
  const { command, surrogate } = METHODS[method];
  const isFree = updates === "free" && surrogate !== "none";
  const flags = [
    group === USUAL.group ? "" : ` --num_generations ${group}`,
    temperature === USUAL.temperature ? "" : ` --temperature ${temperature}`,
    rate === USUAL.rate ? "" : ` --learning_rate ${rate * cfg.learningRate}`,
    updates === USUAL.updates ? "" : ` --num_iterations ${MANY}`,
    isFree ? " --epsilon 1e9 --epsilon_high 1e9" : ""];
  return `python ${command} --num_prompts ${BATCH / group} --num_mini_batches 1${flags.join("")}`;
}

// The reward of an answer. length: of the answer, in tokens, at most T
function rewardOf(kind, isRight, text, length, T) {
  return {
    right: isRight,
    wrong: 1 - isRight,
    length: length / T,
    bug: Number(isRight || (extract(text) ?? "").startsWith("1")),
  }[kind];
}

// ---- one step --------------------------------------------------------------------------------

// A run whose policy is a copy of the base. The same settings give the same run. EXAM_SEED is added
// to the seed, so that no run draws the same random numbers as the exam.
function newRun(base, settings) {
  const policy = copyOf(base);
  return { settings, policy, optimizer: newOptimizer(policy), log: [], seconds: 0,
           random: generator(EXAM_SEED + Number(settings.seed)) };
}

// Sample G answers to one problem, verify them, and compute their rewards and advantages.
function sampleGroup(policy, { prompt, answer }, G, random, settings) {
  const { cfg } = policy;
  const tree = new Tree(policy, Number(settings.temperature));
  const uniforms = uniformNumbers(G * cfg.T, random);
  const completions = finish(rollout(tree, Array(G).fill(prompt), uniforms));
  const logps = completions.map((one) => logProbs(tree, one));
  const texts = completions.map((one) => completionText(one, cfg));
  const isRight = texts.map((text) => verify(answer, text));
  const rewards = texts.map((text, i) =>
    rewardOf(settings.reward, isRight[i], text, completions[i].tokens.length, cfg.T));
  const A = advantages(rewards, settings.method, settings.baseline);
  return { prompt, answer, tree, completions, logps, texts, isRight, rewards, A };
}

function thinks(text) {
  return text.includes("<think>");
}

// The sums in a text, such as 7+4=12. -> [{ sum, isRight }]
function sumsOf(text) {
  const sums = [...text.matchAll(/([0-9]+[-+*][0-9]+=)(-?[0-9]+)/g)];
  return sums.map(([sum, left, result]) => ({ sum, isRight: solve(left) === result }));
}

// One training step: sample the groups, then update the policy with the gradient of (5) and AdamW.
// Yields each group as soon as it is sampled, and null after adding the gradient of a group. The
// metrics of the step go into the log.
function* trainStep(run) {
  const { settings, policy, optimizer, random, log } = run;
  const { cfg } = policy;
  const G = Number(settings.group);
  const groups = [];
  while (groups.length < BATCH / G) {
    const problem = sampleProblem(random, false, cfg);
    groups.push(sampleGroup(policy, problem, G, random, settings));
    yield groups.at(-1);
  }
  const lengths = groups.flatMap(({ completions }) => completions.map((one) => one.tokens.length));
  const step = { B: BATCH, T: cfg.T, numTokens: BATCH * mean(lengths) };
  const clipped = [];                   // 1 for each clipped token, else 0; from update 2 on
  for (let update = 0; update < (settings.updates === "1" ? 1 : MANY); update++) {
    const gradient = zerosLike(policy);
    for (const group of groups.filter(teaches)) {
      const { tree, completions } = update === 0 ? group : asReadNow(group, policy);
      const factors = pushesOf(group, tree, completions, settings, step);
      backward(gradient, tree, completions, factors);
      const withPush = factors.filter((_, i) => update > 0 && group.A[i] !== 0);
      clipped.push(...withPush.flat().map((factor) => Number(factor === 0)));
      yield null;
    }
    adamW(policy, gradient, optimizer, Number(settings.rate) * cfg.learningRate);
  }
  log.push({ ...measured(groups), clipped: clipped.length > 0 ? mean(clipped) : 0 });
}

// The answers of a group as the current policy predicts them, which has moved since it sampled.
function asReadNow({ tree: { temperature }, completions }, policy) {
  const tree = new Tree(policy, temperature);
  return { tree, completions: readAgain(tree, completions) };
}

// How hard each token of a group is pushed, if the policy of a tree predicts it. -> (G)(t)
function pushesOf({ A, logps }, tree, completions, { method, updates }, step) {
  return completions.map((one, i) =>
    pushes(A[i], logProbs(tree, one), logps[i], method, step, updates !== "free"));
}

// Whether a group gives a gradient. If the baseline is the group's mean, the rewards must differ.
function teaches({ A }) {
  return A.some((advantage) => advantage !== 0);
}

// The metrics of a step: shares and means over the answers of the batch, and over its groups.
function measured(groups) {
  const all = groups.flatMap(({ completions, texts, isRight, rewards }) =>
    completions.map(({ tokens }, i) => ({ text: texts[i], right: isRight[i], reward: rewards[i],
                                          length: tokens.length })));
  const share = (test) => mean(all.map((one) => Number(test(one))));
  return {
    right: share(({ right }) => right),
    thinks: share(({ text }) => thinks(text)),
    thinksRight: share(({ text, right }) => thinks(text) && right),
    sums: mean(all.map(({ text }) => sumsOf(text).length)),
    sumsRight: mean(all.map(({ text }) => sumsOf(text).filter(({ isRight }) => isRight).length)),
    empty: share(({ text }) => text.includes("<answer></answer>")),
    ones: share(({ text }) => (extract(text) ?? "").startsWith("1")),
    reward: mean(all.map(({ reward }) => reward)),
    length: mean(all.map(({ length }) => length)),
    signal: mean(groups.map((group) => Number(teaches(group)))),
  };
}

// Why a run ends after its last step: "learned", "silent" or "limit"; null if it continues.
function reasonToStop({ log, settings }) {
  const last = log.slice(-RECENT).map(({ right }) => right);
  const isEnough = last.length === RECENT && mean(last) >= ENOUGH;
  if (isEnough && settings.reward === "right") return "learned";
  const signals = log.slice(-SILENT).map(({ signal }) => signal);
  if (signals.length === SILENT && Math.max(...signals) === 0) return "silent";
  return log.length >= LIMIT ? "limit" : null;
}

// ---- the events of a run ---------------------------------------------------------------------

// The mean of a metric over the last three steps up to a step.
function smoothed(log, metric, step = log.length) {
  return mean(log.slice(Math.max(0, step - 3), step).map((one) => one[metric]));
}

function inPercent(part, whole = 1) {
  return whole > 0 ? `${Math.round(100 * part / whole)}%` : "none";
}

// Events, each of which is reported at most once in a run: a condition and a text. now: means over
// the last three steps; best: the highest share of right answers so far
const EVENTS = {
  first: [({ log }) => log.length === 1,
    ({ log: [{ right, thinks, thinksRight }] }) => {
      const [t, tr, r] = [thinks, thinksRight, right].map((share) => Math.round(BATCH * share));
      return t === 0 ? `None of the base’s ${BATCH} answers thinks first. ${r} are right.` :
        `Of the base’s ${BATCH} answers, ${t} think first, and ${tr} of those are right. The ` +
        `other ${BATCH - t} guess, and ${r - tr} of those are right.`;
    }],
  half: [({ log, now }) => log[0].thinks < 0.45 && now.thinks >= 0.5,
    ({ settings, now }) => "Half of the answers think first now. " + ({
      right: "Thinking itself gets no reward. But of the answers that think, " +
        `${inPercent(now.thinksRight, now.thinks)} are right, and of the others ` +
        `${inPercent(now.right - now.thinksRight, 1 - now.thinks)}.`,
      length: "A thought is long, and long answers get more reward.",
    }[settings.reward] ?? "")],
  switched: [({ settings, now }) => settings.reward === "right" && now.thinks >= 0.95 &&
    now.right >= 0.5,
    ({ now }) => "Nearly all answers think first now, and " +
      `${inPercent(now.thinksRight, now.thinks)} of those are right. Of the sums in them, ` +
      `${inPercent(now.sums - now.sumsRight, now.sums)} are wrong. From now on, only better sums ` +
      "can bring more rewards."],
  blurts: [({ log, now }) => log[0].thinks > 0.1 && now.thinks <= 0.05,
    () => "Hardly any answer thinks first any more."],
  agree: [({ log, now, settings }) => log.length >= 3 && now.signal <= 0.5 &&
    settings.baseline === "mean" && settings.group !== "2",
    ({ settings }) => `In half of the boxes all ${settings.group} answers got the same reward, ` +
      "so none is better than the mean and nothing is pushed. Only framed boxes give a gradient."],
  hacked: [({ log, now, best, settings }) => ["length", "bug"].includes(settings.reward) &&
    best - now.right >= 0.2 && now.reward > smoothed(log, "reward", 3) + 0.1,
    ({ now, best }) => `The reward has risen to ${now.reward.toFixed(2)} of 1, but right answers ` +
      `have fallen from ${inPercent(best)} to ${inPercent(now.right)}. The model does what is ` +
      "rewarded, not what was meant."],
  ones: [({ now, settings }) => settings.reward === "bug" && now.ones >= 0.85,
    ({ now }) => `${inPercent(now.ones)} of the answers begin with 1.`],
  empty: [({ now }) => now.empty >= 0.5,
    ({ settings }) => "Half of the answers are empty. " + (settings.reward === "wrong" ?
      "There is no surer way to be wrong." : "No answer is shorter.")],
  clipped: [({ now }) => now.clipped >= 0.01,
    ({ now }) => `${inPercent(now.clipped)} of the tokens have left the range of the clip since ` +
      "they were sampled, so they are not pushed any further."],
  cut: [({ now, cfg }) => now.length >= 0.93 * cfg.T,
    ({ cfg }) => `Answers reach the limit of ${cfg.T} tokens, and are cut off.`],
  done: [({ log, now }) => log.length >= 3 && now.signal <= 0.2 && now.right >= 0.93,
    () => "In nearly all boxes every answer is right, so there is nothing left to learn from " +
      "them."],
  silent: [({ log, now }) => log.length >= 3 && now.signal === 0 && now.right < 0.9,
    ({ now }) => "For three steps all answers of each box have got the same reward, " +
      (now.right < 0.05 ? "and nearly all of them are wrong. " : "even where they are wrong. ") +
      "So there is no gradient, and no way out."],
};

// The events that happened for the first time in the last step. seen: names of earlier events, to
// which these are added. -> texts
function newEvents({ settings, policy: { cfg }, log }, seen) {
  const metrics = Object.keys(log[0]);
  const now = Object.fromEntries(metrics.map((metric) => [metric, smoothed(log, metric)]));
  const best = Math.max(...log.map((_, i) => smoothed(log, "right", i + 1)));
  const state = { settings, cfg, log, now, best };
  const fresh = Object.entries(EVENTS).filter(([name, [when]]) => !seen.has(name) && when(state));
  return fresh.map(([name, [, text]]) => {
    seen.add(name);
    return text(state);
  });
}

// ---- the exam --------------------------------------------------------------------------------

// The first `count` held-out problems of a fixed random sequence, without repetitions.
function examProblems(count, cfg) {
  const random = generator(EXAM_SEED);
  const found = new Map();
  while (found.size < count) {
    const one = sampleProblem(random, true, cfg);
    found.set(one.prompt, one);
  }
  return [...found.values()];
}

// The greedy answer of a policy or, if there are uniform numbers, a random one.
// forced: tokens that it has to begin with
function answerTo(policy, prompt, uniforms = null, forced = []) {
  const tree = new Tree(policy);
  const [completion] = finish(rollout(tree, [prompt], uniforms, forced));
  return { tree, completion, text: completionText(completion, policy.cfg) };
}

// The tokens that force an answer to begin with a thought.
function thought({ specialTokens }) {
  return [256 + specialTokens.indexOf("<think>")];
}

// The first problem of the exam that the trained policy gets right, but the base gets wrong, even
// if it is forced to think.
function firstProblem(base, trained) {
  const verdict = (policy, { prompt, answer }, forced = []) =>
    verify(answer, answerTo(policy, prompt, null, forced).text);
  const problems = examProblems(EXAM_SIZE, base.cfg);
  return problems.find((one) => verdict(trained, one) && !verdict(base, one) &&
                                !verdict(base, one, thought(base.cfg))) ?? problems[0];
}

// Count how many problems of the exam a policy solves greedily. Yields after every ten problems.
// forced: tokens that each answer has to begin with
function* examine(policy, forced = []) {
  let right = 0;
  const problems = examProblems(EXAM_SIZE, policy.cfg);
  for (let start = 0; start < problems.length; start += 10) {
    const some = problems.slice(start, start + 10);
    const prompts = some.map(({ prompt }) => prompt);
    const completions = finish(rollout(new Tree(policy), prompts, null, forced));
    some.forEach(({ answer }, i) => {
      right += verify(answer, completionText(completions[i], policy.cfg));
    });
    yield right;
  }
  return right;
}

// ---- one group, token by token ---------------------------------------------------------------

// One step of GRPO on a single group. -> times: how many times as likely each answer is afterwards;
// tokens: Map "node:token" -> { up, down: sums of its answers' positive and negative pushes; net:
// the push on its logit; before, after: its probability }
function pushGroup(policy, optimizer, group) {
  const { tree, completions } = group;
  const gradient = zerosLike(policy);
  const factors = pushesOf(group, tree, completions, USUAL, { B: completions.length });
  backward(gradient, tree, completions, factors);
  adamW(policy, gradient, optimizer, policy.cfg.learningRate);
  const now = asReadNow(group, policy);
  const times = now.completions.map((one, i) => Math.exp(one.tokens.length *
    (mean(logProbs(now.tree, one)) - mean(group.logps[i]))));
  return { times, tokens: pushedTokens(group, factors, now) };
}

// At each node of a tree, every answer that passes it pushes the logit of each token: by factor *
// (1 - p) if the answer continues with this token, by -factor * p if with a different one.
function pushedTokens({ tree, completions }, factors, now) {
  const sums = new Map();               // node -> sum of the factors of all answers that pass it
  const found = new Map();
  completions.forEach(({ tokens, nodes }, i) => tokens.forEach((id, t) => {
    const node = nodes[t];
    const key = `${node}:${id}`;
    const factor = factors[i][t];
    sums.set(node, (sums.get(node) ?? 0) + factor);
    if (!found.has(key)) {
      const after = now.tree.next[now.completions[i].nodes[t]].p[id];
      found.set(key, { id, node, up: 0, down: 0, before: tree.next[node].p[id], after });
    }
    found.get(key)[factor > 0 ? "up" : "down"] += factor;
  }));
  for (const one of found.values()) one.net = one.up + one.down - one.before * sums.get(one.node);
  return found;
}

// Group answers by how they begin. -> branches { tokens: [{ id, node }], withIt, branches }
function branchesOf(completions, withIt = completions.map((_, i) => i), depth = 0) {
  const byToken = new Map();
  for (const i of withIt) {
    const id = completions[i].tokens[depth];
    if (id === undefined) continue;
    if (!byToken.has(id)) byToken.set(id, []);
    byToken.get(id).push(i);
  }
  return [...byToken].map(([id, members]) => {
    const first = completions[members[0]];
    const tokens = [];
    let end = depth;
    const isShared = (t) => members.every((i) => completions[i].tokens[t] === first.tokens[t]);
    for (; end < first.tokens.length && isShared(end); end++) {
      tokens.push({ id: first.tokens[end], node: first.nodes[end] });
    }
    return { tokens, withIt: members, branches: branchesOf(completions, members, end) };
  });
}

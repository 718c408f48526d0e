// One group, as GRPO sees it: eight answers, their rewards and advantages, and one step on them.

// What is shown: { name, tree, completions, rewards, changes, prompt, answer }; name is of the
// policy, changes are those of log pi(o) by a step on the group, or null.
let group = null;

function sampleGroup() {
  const name = byId("group-policy").value;
  const tree = new Tree(policies[name], Number(byId("temperature").value));
  const uniforms = uniformNumbers(G * cfg.T, Math.random);
  const completions = finish(rollout(tree, Array(G).fill(problem.prompt), uniforms));
  const texts = completions.map((completion) => completionText(completion, cfg));
  const rewards = texts.map((text) => verify(problem.answer, text));
  group = { name, tree, completions, rewards, changes: null, ...problem };
  showGroup();
}

// How hard each token of each completion is pushed: share, from -1 to 1 of the hardest push of the
// group, and why, in words.
function tokenPushes({ tree, completions }, A, method) {
  const factors = pushes(A, completions, method, cfg.T, 1);
  const chances = completions.map(({ tokens, nodes }) =>
    tokens.map((id, t) => tree.next[nodes[t]].p[id]));
  const sizes = chances.map((row, i) => row.map((p) => factors[i] * (1 - p) / tree.temperature));
  const hardest = Math.max(...sizes.flat().map(Math.abs));
  return sizes.map((row, i) => row.map((size, t) => ({
    share: hardest > 0 ? size / hardest : 0,
    why: reasonFor(A[i], factors[i], chances[i][t], tree.temperature, size),
  })));
}

function reasonFor(advantage, factor, p, temperature, size) {
  if (advantage === 0) return "not pushed: the advantage is 0";
  const word = advantage > 0 ? "up" : "down";
  const length = Math.round(advantage / factor);
  const weight = length === 1 ? "" : ` × 1/${length}`;
  const heat = temperature === 1 ? "" : ` / ${temperature}`;
  return `pushed ${word}: ${signed(advantage)}${weight} × (1 − ${p.toFixed(2)})${heat} = ` +
         signed(size, 4);
}

function showGroup() {
  const { tree, completions, rewards, changes } = group;
  const method = byId("group-method").value;
  const A = advantages(rewards, method);
  const pushed = tokenPushes(group, A, method);
  const longest = Math.max(1, ...A.map(Math.abs));
  const head = element("div", { class: "row head" }, element("span", {}, "reward"),
    element("span", {}, "answer"),
    element("span", {}, changes ? "advantage, and how many times as likely now" : "advantage"));
  const rows = completions.map((completion, i) => element("div", { class: "row" },
    rewardMark(rewards[i]),
    tokenLine(`answer ${i + 1} of ${G}`, tree, completion, pushed[i]),
    element("div", { class: "advantage" },
      advantageBar(A[i], longest),
      element("span", { class: "number" }, signed(A[i])),
      changes && element("strong", {}, `×${Math.exp(changes[i]).toFixed(2)}`))));
  byId("group-rows").replaceChildren(head, ...rows);
  showFigures(method);
  byId("group-note").replaceChildren(...noteOn(A));
  showButtons();
}

function rewardMark(reward) {
  const kind = reward ? "good" : "bad";
  return element("span", { class: `reward ${kind}` }, reward ? "✓ 1" : "✗ 0");
}

// A bar from the middle, to the right where the advantage is positive.
function advantageBar(advantage, longest) {
  const length = 50 * Math.abs(advantage) / longest;
  const left = advantage > 0 ? 50 : 50 - length;
  const bar = element("i", { class: advantage > 0 ? "up" : "down" });
  return element("span", { class: "track" },
                 styled(bar, { "--left": `${left}%`, "--length": `${length}%` }));
}

function showFigures(method) {
  const { name, prompt, rewards } = group;
  const right = rewards.reduce((sum, r) => sum + r, 0);
  const figures = {
    "problem": prompt, "answered by": name, "right": `${right} of ${G}`,
    "mean": mean(rewards).toFixed(3), "std": std(rewards).toFixed(3),
    "advantage": METHODS[method].formula, "weight of a token": METHODS[method].weight,
    "the method in Python": METHODS[method].command };
  byId("group-figures").replaceChildren(...Object.entries(figures).map(([term, value]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, element("code", {}, value)))));
}

// What there is to see in a group. -> nodes
function noteOn(A) {
  const { answer, rewards, changes } = group;
  if (answer === null) {
    return [element("strong", {}, "No signal. "),
            "Nobody can verify this, so nothing is rewarded."];
  }
  if (!hasSignal(rewards)) {
    const advice = rewards[0] ? "A harder problem or a weaker policy would give signal."
                              : "Sample again, or raise the temperature, to get a right one.";
    return [element("strong", {}, "No signal. "),
            `All eight are ${rewards[0] ? "right" : "wrong"}: none is better than the mean, every `,
            `advantage is 0, and this group teaches nothing. ${advice}`];
  }
  if (changes !== null) {
    return [element("strong", {}, "After one step "),
            `of AdamW on this group alone, with learning rate ${cfg.learningRate}: ×2.00 is `,
            "twice as likely as before. Answers that begin alike share a fate: a wrong one can ",
            "rise with the right ones. What has learned is kept as yours; sample it, and go on."];
  }
  return [`A right answer gets ${signed(A[rewards.indexOf(1)])}, a wrong one `,
          `${signed(A[rewards.indexOf(0)])}. A token is pushed by advantage × weight × `,
          "(1 − its probability): where the policy was sure, there is little to push. So the ",
          "colour sits where answers part: at the first tag, which is to think or to blurt, and ",
          "at the digits of a guess. With rewards of 0 and 1 the methods differ within one group ",
          "only by a factor, and GRPO in that a token of a long answer weighs less. The factor ",
          "counts where groups are added up: MaxRL gives rare success more."];
}

// What the next step on the group would make of "yours".
function learnLabel() {
  const { name } = group;
  const origin = name === "yours" ? yours.from : name;
  const steps = name === "yours" ? yours.steps + 1 : 1;
  return `Learn from it (yours: ${origin} + ${steps} step${steps > 1 ? "s" : ""})`;
}

// One real optimizer step on the group, and how likely its answers are then.
function learnFromGroup() {
  const { name, tree, completions, rewards } = group;
  const method = byId("group-method").value;
  if (name !== "yours") beginFrom(name);
  const gradient = zerosLike(policies.yours);
  const A = advantages(rewards, method);
  backward(gradient, tree, completions, pushes(A, completions, method, cfg.T, G));
  adamW(policies.yours, gradient, yours.optimizer, cfg.learningRate);
  yours.steps += 1;
  byId("exam").hidden = true;
  forgetCounts();

  const after = new Tree(policies.yours, tree.temperature);
  const again = readAgain(after, completions);
  group.changes = completions.map((completion, i) =>
    logLikelihood(after, again[i]) - logLikelihood(tree, completion));
  showGroup();
  answerAll();
  showLiveAnswer();
}

fillSelect(byId("group-policy"), Object.keys(policies), "base");
fillSelect(byId("group-method"), Object.keys(METHODS), "GRPO");
byId("sample").addEventListener("click", sampleGroup);
byId("learn").addEventListener("click", learnFromGroup);
byId("group-policy").addEventListener("change", sampleGroup);
byId("group-method").addEventListener("change", () => {
  if (group.changes === null) {
    showGroup();
  } else {
    sampleGroup();                      // what has changed was by the other method
  }
});
byId("temperature").addEventListener("change", sampleGroup);
byId("temperature").addEventListener("input", ({ target }) => {
  byId("temperature-value").textContent = Number(target.value).toFixed(1);
});

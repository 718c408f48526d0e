// One group, as GRPO sees it: eight answers, their rewards and advantages, and one step on them.

let group = null;       // { name, tree, completions, rewards, changes } of the answers that are shown
let isTraining = false; // while train.js trains, nothing else may

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
  const weights = completions.map(({ tokens }) => METHODS[method].tokenWeight(tokens.length, cfg.T));
  const sizes = completions.map(({ tokens, nodes }, i) => tokens.map((id, t) =>
    A[i] * weights[i] * (1 - tree.next[nodes[t]].p[id])));
  const hardest = Math.max(...sizes.flat().map(Math.abs));
  return sizes.map((row, i) => row.map((size, t) => {
    const { tokens, nodes } = completions[i];
    const p = tree.next[nodes[t]].p[tokens[t]];
    return { share: hardest > 0 ? size / hardest : 0, why: reasonFor(A[i], weights[i], p) };
  }));
}

function reasonFor(advantage, weight, p) {
  if (advantage === 0) return "not pushed: the advantage is 0";
  const word = advantage > 0 ? "up" : "down";
  const share = weight === 1 ? "" : ` × 1/${Math.round(1 / weight)}`;
  const size = signed(advantage * weight * (1 - p), 4);
  return `pushed ${word}: ${signed(advantage)}${share} × (1 − ${p.toFixed(2)}) = ${size}`;
}

function showGroup() {
  const { tree, completions, rewards, changes } = group;
  const method = byId("group-method").value;
  const A = advantages(rewards, method);
  const pushed = tokenPushes(group, A, method);
  const longest = Math.max(1, ...A.map(Math.abs));
  byId("group-rows").replaceChildren(...completions.map((completion, i) =>
    element("div", { class: "row" },
      element("span", { class: rewards[i] ? "reward good" : "reward bad", title: "reward" },
              rewards[i] ? "✓ 1" : "✗ 0"),
      tokenLine(tree, completion, pushed[i]),
      element("div", { class: "advantage" },
        advantageBar(A[i], longest),
        element("span", { title: "advantage" }, signed(A[i])),
        changes && element("strong", { title: "how many times as likely as before the step" },
                           `×${Math.exp(changes[i]).toFixed(2)}`)))));
  showFigures(method);
  byId("group-note").replaceChildren(...noteOn(A, method));
  showLearnButton();
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
  const { prompt, rewards } = group;
  const right = rewards.reduce((sum, r) => sum + r, 0);
  const figures = {
    "problem": prompt, "right": `${right} of ${G}`, "mean": mean(rewards).toFixed(3),
    "std": std(rewards).toFixed(3), "advantage": METHODS[method].formula,
    "weight of a token": METHODS[method].weight, "as in": METHODS[method].command };
  byId("group-figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, element("code", {}, value)))));
}

// What there is to see in a group. -> nodes
function noteOn(A, method) {
  const { answer, rewards, changes } = group;
  if (answer === null) {
    return [element("strong", {}, "No signal. "), "Nobody can verify this, so nothing is rewarded."];
  }
  if (!hasSignal(rewards)) {
    const advice = rewards[0] ? "A harder problem or a weaker policy would."
                              : "Sample again, or raise the temperature.";
    return [element("strong", {}, "No signal. "),
            `All eight are ${rewards[0] ? "right" : "wrong"}: none is better than the mean, every `,
            `advantage is 0, and this group teaches nothing. ${advice}`];
  }
  if (changes !== null) {
    return [element("strong", {}, "After one step "),
            `of AdamW on this group alone, with learning rate ${cfg.learningRate}: ×2.00 is twice `,
            "as likely as before. Answers that begin alike share a fate: a wrong one can rise ",
            "with the right ones. What has learned is kept as yours; sample it, and go on."];
  }
  return [`A right answer gets ${signed(A[rewards.indexOf(1)])}, a wrong one `,
          `${signed(A[rewards.indexOf(0)])}. A token is pushed by advantage × weight × `,
          "(1 − its probability): where the policy was sure, there is nothing to learn. So the ",
          "colour sits where answers part, mostly at the first token: think, or blurt?"];
}

function showLearnButton() {
  const { name, rewards, changes } = group;
  const origin = name === "yours" ? yours.from : name;
  const steps = name === "yours" ? yours.steps + 1 : 1;
  byId("learn").textContent =
    `Learn from it (yours: ${origin} + ${steps} step${steps > 1 ? "s" : ""})`;
  byId("learn").disabled = isTraining || !hasSignal(rewards) || changes !== null;
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

  const after = new Tree(policies.yours, tree.temperature);
  const scored = score(after, completions);
  const likelihood = (of, completion) => logProbs(of, completion).reduce((sum, x) => sum + x, 0);
  group.changes = completions.map((completion, i) =>
    likelihood(after, scored[i]) - likelihood(tree, completion));
  showGroup();
  answerAll();
  showLiveAnswer();
  forgetCounts();
}

fillSelect(byId("group-policy"), Object.keys(policies), "base");
fillSelect(byId("group-method"), Object.keys(METHODS), "GRPO");
byId("sample").addEventListener("click", sampleGroup);
byId("learn").addEventListener("click", learnFromGroup);
byId("group-policy").addEventListener("change", sampleGroup);
byId("group-method").addEventListener("change", showGroup);
byId("temperature").addEventListener("change", sampleGroup);
byId("temperature").addEventListener("input", ({ target }) => {
  byId("temperature-value").textContent = Number(target.value).toFixed(1);
});

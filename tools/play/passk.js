// Was it there all along? pass@k and maj@k of all policies, drawn as they are sampled.

const NUM_SAMPLES = 32;
const KS = [1, 2, 4, 8, 16, 32];
let counts = {};        // of each policy: of each problem, pass@k and maj@k at each of KS

// The number that an answer stands for, 7 for 07; null where there is none.
function vote(text) {
  const answer = extract(text);
  return /^-?[0-9]{1,20}$/.test(answer ?? "") ? String(BigInt(answer)) : answer;
}

function countOne(policy, { prompt, answer }) {
  const tree = new Tree(policy);
  const uniforms = uniformNumbers(NUM_SAMPLES * cfg.T, Math.random);
  const completions = finish(rollout(tree, Array(NUM_SAMPLES).fill(prompt), uniforms));
  const texts = completions.map((completion) => completionText(completion, cfg));
  const right = texts.filter((text) => verify(answer, text)).length;
  const votes = texts.map(vote);
  return {
    pass: KS.map((k) => passAtK(NUM_SAMPLES, right, k)),
    maj: KS.map((k) => majAtK(answer, votes, k)),
  };
}

// 25 problems more, the same ones for all policies.
async function countMore() {
  const names = Object.keys(policies);
  if (names.some((name) => counts[name] === undefined)) counts = {};
  begin("counting");
  for (let i = 0; i < 25 && !isStopping; i++) {
    const one = sampleProblem(Math.random, true, cfg);
    for (const name of names) {
      (counts[name] ??= []).push(countOne(policies[name], one));
      await breathe();
    }
    showCounts();
  }
  end();
  say(byId("passk-chart").firstChild.getAttribute("aria-label"));
}

function showCounts() {
  const names = Object.keys(counts);
  const series = names.flatMap((name) => ["pass", "maj"].map((kind) => ({
    name: `${name} ${kind}`, kind: kind === "maj" ? `${name} dashed` : name,
    points: KS.map((k, i) => [k, mean(counts[name].map((one) => one[kind][i]))]) })));
  chart(byId("passk-chart"), "pass@k and maj@k at k = 32", series, { x: KS, y: [0, 0.5, 1] },
        (k) => Math.log2(k) / 5);
  byId("num-counted").textContent = names.length > 0 ? counts[names[0]].length : 0;
}

function clearCounts() {
  counts = {};
  showCounts();
  showButtons();
}

// The reader's policy has changed: what was counted is of another one, so all begins anew.
function forgetCounts() {
  if (counts.yours) clearCounts();
}

byId("count").addEventListener("click", () => {
  if (activity === "counting") {
    stop();
  } else {
    countMore();
  }
});
byId("count-anew").addEventListener("click", clearCounts);

// ---- the page begins -------------------------------------------------------------------------

pose(problem);
showIntroduction();
byId("live-group").append("They come with the first step.");
showCurves();
showCounts();
addEventListener("resize", () => {
  hideTip();
  showCurves();
  showCounts();
});

// Was it there all along? The pass@k of all policies, updated while they sample.

const KS = [1, 2, 4, 8, 16, 32];
const NUM_SAMPLES = KS.at(-1);
let counts = null;      // policy -> for each problem, how many samples were right

async function countSamples() {
  activity = "counting";
  showButtons();
  const names = Object.keys(policies);
  counts = Object.fromEntries(names.map((name) => [name, []]));
  for (const one of examProblems(25, cfg)) {
    for (const name of names) {
      const group = sampleGroup(policies[name], one, NUM_SAMPLES, Math.random, USUAL);
      counts[name].push(group.isRight.reduce((sum, right) => sum + right, 0));
      await breathe();
    }
    showCounted();
  }
  activity = null;
  showButtons();
  say(byId("passk").textContent);
}

function showCounted() {
  const head = KS.map((k) => element("th", { scope: "col" }, `k = ${k}`));
  const rows = Object.entries(counts).map(([name, some]) => element("tr", {},
    element("th", { scope: "row" }, nameOf(name)),
    KS.map((k) => element("td", {},
      percent(mean(some.map((right) => passAtK(NUM_SAMPLES, right, k))))))));
  rows.push(element("tr", {}, element("th", { scope: "row" }, "random guesses"),
    KS.map((k) => element("td", {}, percent(1 - (20 / 21) ** k)))));
  byId("passk").replaceChildren(element("tr", {},
    element("th", { scope: "col" }, plural(counts.base.length, "problem")), head), ...rows);
}

byId("count").addEventListener("click", countSamples);

// The experiments and the settings on the page, and the texts about them.

// The experiment with these settings, or undefined if there is none.
function experimentOf(wanted) {
  const address = addressOf({ ...wanted, seed: USUAL.seed });
  return EXPERIMENTS.find(({ set }) => addressOf({ ...USUAL, ...set }) === address);
}

// A card whose button sets an experiment and trains from the base.
function experimentCard({ name, set, watch }) {
  const button = element("button", {}, name);
  button.addEventListener("click", () => {
    change({ ...USUAL, ...set });
    trainAgain();
  });
  const time = element("small");
  time.settings = { ...USUAL, ...set };
  return element("div", { class: "experiment" }, button, element("span", {}, linked(watch)), time);
}

function showExperiments() {
  const fates = EXPERIMENTS.map(({ name }) =>
    fateOf(stored.measured?.experiments[name], stored.measured?.usual));
  for (const fate of Object.keys(FATES).filter((one) => fates.includes(one))) {
    const cards = EXPERIMENTS.filter((_, i) => fates[i] === fate).map(experimentCard);
    byId("experiments").append(element("h3", {}, FATES[fate]),
                               element("div", { class: "experiments" }, cards));
  }
}

function trainAgain() {
  showStage();
  beginRun();
  train();
}

// ---- the measured runs -----------------------------------------------------------------------

// The measured runs with these settings, one for each seed from 1 on, or undefined.
function measuredRuns(settings) {
  const isUsual = addressOf({ ...settings, seed: USUAL.seed }) === "";
  if (isUsual) return stored.measured?.usual;
  return stored.measured?.experiments[experimentOf(settings)?.name];
}

let slowness = null;    // how many times as long as where we measured a step takes in this browser

// Compare the speed of a run that has ended with that of the measured run with the same seed.
function learnSpeed({ settings, seconds, log }) {
  const ours = measuredRuns(settings)?.[settings.seed - 1];
  if (ours?.seconds) slowness = seconds / log.length / (ours.seconds / ours.steps);
  showTimes();
}

// How long runs with these settings take on average. -> text, empty if this was not measured
function timeOf(settings) {
  const seconds = (slowness ?? 1) * mean((measuredRuns(settings) ?? []).map((one) => one.seconds));
  if (!(seconds > 0)) return "";
  const rounded = seconds < 9 ? Math.ceil(seconds) : 5 * Math.round(seconds / 5);
  return `about ${plural(rounded, "second")}`;
}

function showTimes() {
  for (const node of document.querySelectorAll(".experiment small")) {
    node.textContent = timeOf(node.settings);
  }
  const next = timeOf(settings);
  const where = slowness === null ? "on our computer" : "in this browser";
  byId("time").textContent = next === "" ? "" : `: ${next} ${where}`;
}

// The exam results of measured runs, as the end of a sentence.
function ourExams(runs) {
  return `seeds 1 to ${runs.length} gave us ${eachOf(runs, "exam")} of ${EXAM_SIZE}`;
}

// Two texts for the end of a run: what its experiment does, and results to compare with.
function textsAfter(settings) {
  const experiment = experimentOf(settings);
  const runs = measuredRuns(settings);
  if (!experiment || !runs) return ["", ""];
  const others = stored.measured.beside[experiment.name];
  const more = others ? ` With ${experiment.method}, ${ourExams(others)}.` : "";
  return [experiment.after((name) => eachOf(runs, name)),
          `${more} In the usual run, ${ourExams(stored.measured.usual)}.`];
}

// How much of a usual result comes from thinking, and how much from better sums. -> text, empty
// unless the sums got better and the exam went better than that of a base forced to think
function textOnSums({ log, exam }) {
  const forced = stored.measured?.forced;
  const [before, after] = [log.slice(0, RECENT), log.slice(-RECENT)].map((steps) =>
    mean(steps.map((one) => one.sumsRight)) / mean(steps.map((one) => one.sums)));
  if (!(exam > forced && after > before + 0.01)) return "";
  return "It learned two things. One is to think: if each answer of the base is forced to begin " +
    `with a thought, ${forced} of ${EXAM_SIZE} are right. The other is its sums: in the samples, ` +
    `${inPercent(before)} of them were right over the first ${RECENT} steps, and ` +
    `${inPercent(after)} over the last ${RECENT}. Nobody told it which were wrong.`;
}

// ---- the texts about a step ------------------------------------------------------------------

// Two descriptions of a step with these settings: a plain one, and one for experts.
function textsOfStep({ reward, baseline, method, updates, rate, temperature }) {
  const { scale, average, surrogate } = METHODS[method];
  const [, rewarded] = SETTINGS.reward.options.find(([name]) => name === reward);
  const push = {
    "mean": "push up (make more likely) the answers that got more reward than the mean of their " +
      "box, and push down those that got less",
    "0": "push up the answers that got a reward, and leave the rest alone",
    "1": "push down the answers that got less than 1, and leave the rest alone",
    "-1": "push all answers up, and those with more reward harder" }[baseline];
  const A = baseline === "mean" ? ADVANTAGES[scale].formula :
    `r − ${baseline}`.replace("− -", "+ ");
  const [low, high] = CLIP_RANGES[surrogate] ?? [];
  const bounds = { clip: `ratio clipped to ${1 - low} … ${1 + high}`, none: "no ratio",
                   gspo: `ratio of the whole answer, clipped to ${1 - low} … ${1 + high}`,
                   cispo: `ratio capped at ${1 + high}` };
  const ratio = updates === "free" ? "ratio not clipped" : bounds[surrogate];
  return [`In each step, we draw problems, and the model samples answers to them. We reward ` +
          `${rewarded}. Then we ${push}. The model gets no other information.`,
          `Temperature: ${temperature}. Advantage: ${A}, where the reward r is between 0 and 1. ` +
          `Weight of a token: ${AVERAGES[average].formula}, where B = ${BATCH} is the number of ` +
          "answers. AdamW with learning rate " +
          `${Number((rate * cfg.learningRate).toPrecision(3))}, ` +
          (updates === "1" ? "one update per batch, so every ratio is 1. " :
            `four updates per batch, ${ratio}. `) + "No KL penalty."];
}

// ---- the settings ----------------------------------------------------------------------------

// Set the settings of the next run, also in the address.
function change(next) {
  settings = next;
  if (run.log.length === 0) {
    run = freshRun();
    layOutSquares();
  }
  showSettings();
}

function showSettings() {
  const texts = textsOfStep(run.settings);
  byId("a-step").replaceChildren(...texts.map((text) => element("p", {}, linked(text))));
  for (const key of Object.keys(SETTINGS)) byId(`set-${key}`).value = settings[key];
  const experiment = experimentOf(settings);
  const isUsual = addressOf(settings) === "";
  const name = experiment?.name ?? labelOf(settings);
  byId("recipe").textContent = isUsual ? "" : `${name}. `;
  const chapter = element("a", { href: `path.html#${experiment?.rung}` },
                          "The path has a chapter about this.");
  byId("watch").replaceChildren(...linked(experiment?.watch ?? ""),
                                ...(experiment?.rung ? [" ", chapter] : []));
  showTimes();
  byId("from-link").textContent = isUsual ? "" : `Settings: ${name}.`;
  if (!isUsual || location.hash.includes("=")) {
    history.replaceState(null, "", "#" + addressOf(settings));
  }
}

for (const [key, { title, options }] of Object.entries(SETTINGS)) {
  const select = element("select", { id: `set-${key}`, autocomplete: "off" },
    options.map(([value, name]) => element("option", { value }, name)));
  select.addEventListener("change", () => change({ ...settings, [key]: select.value }));
  byId("mix-button").before(element("label", {}, title, select));
}
showExperiments();
byId("mix-button").addEventListener("click", trainAgain);
addEventListener("hashchange", () => {
  if (location.hash.includes("=") && activity === null) change(settingsOf(location.hash));
});

// Which problem the page shows at the top, and what was measured about a single push.
if (stored.measured !== null) {
  const { base: baseRight, forced, hand: { groups, asPushed, risen } } = stored.measured;
  byId("picked").textContent = `Of the ${EXAM_SIZE} problems of the exam, the base gets ` +
    `${baseRight} right, and ${forced} if each answer is forced to begin with a thought. The ` +
    "problem at the top is the first one that the trained policy gets right, but the base gets " +
    "wrong both times.";
  byId("by-hand").textContent = `We tried this with ${groups} groups of answers to the problem ` +
    "at the top. Of the tokens whose probability changed by half a percentage point or more, " +
    `${inPercent(asPushed)} moved in the direction in which they were pushed; the others were ` +
    `moved by weights that all tokens share. Of the wrong answers, ${inPercent(risen)} became ` +
    "more likely.";
}

// The levers and the settings as they stand on the page, and what is said of them.

// The lever that makes these settings, or undefined.
function leverOf(wanted) {
  const address = addressOf({ ...wanted, seed: USUAL.seed });
  return LEVERS.find(({ set }) => addressOf({ ...USUAL, ...set }) === address);
}

// A button that trains from the base with one thing changed.
function leverButton({ name, set, watch }) {
  const button = element("button", { class: "lever" },
                         element("b", {}, name), element("span", {}, watch));
  button.addEventListener("click", () => {
    change({ ...USUAL, ...set });
    trainAnew();
  });
  return button;
}

function showLevers() {
  const fates = LEVERS.map(({ name }) =>
    fateOf(stored.measured?.levers[name], stored.measured?.usual));
  for (const fate of Object.keys(FATES).filter((one) => fates.includes(one))) {
    const buttons = LEVERS.filter((_, i) => fates[i] === fate).map(leverButton);
    byId("levers").append(element("h3", {}, FATES[fate]),
                          element("div", { class: "levers" }, buttons));
  }
}

function trainAnew() {
  showStage();
  beginRun();
  train();
}

// ---- what is said of them --------------------------------------------------------------------

// At the end of a run: what its lever does, and how it ended with several seeds. -> two texts
function textsAfter(settings) {
  const { measured } = stored;
  const lever = leverOf(settings);
  const isUsual = addressOf({ ...settings, seed: USUAL.seed }) === "";
  if (measured === null || !lever && !isUsual) return ["", ""];
  const usual = `with seeds 1 to ${measured.usual.length}: ${eachOf(measured.usual, "exam")}`;
  if (isUsual) return ["", `Exams measured before, ${usual} of 100.`];
  const runs = measured.levers[lever.name];
  const others = measured.beside[lever.name];
  const more = others ? `; with ${lever.method}: ${eachOf(others, "exam")}` : "";
  return [lever.after((name) => eachOf(runs, name)),
          `Exams measured before, with seeds 1 to ${runs.length}: ${eachOf(runs, "exam")} of ` +
          `100${more}. As usual, ${usual}.`];
}

// What one step does with these settings: in words, and for those who know the terms.
function textsOfStep({ reward, baseline, method, updates, rate, temperature }) {
  const { scale, average, surrogate } = METHODS[method];
  const [, rewarded] = SETTINGS.reward.options.find(([name]) => name === reward);
  const push = {
    "mean": "push up (make likelier) what earned more than its box’s mean, down what earned less",
    "0": "push up what earned something, leave the rest alone",
    "1": "push down what earned less than 1, leave the rest alone",
    "-1": "push everything up, what earned more harder" }[baseline];
  const A = baseline === "mean" ? ADVANTAGES[scale].words : `r − ${baseline}`.replace("− -", "+ ");
  const [low, high] = CLIP_RANGES[surrogate] ?? [];
  const bounds = { clip: `ratio clipped to ${1 - low} … ${1 + high}`, none: "no ratio",
                   gspo: `ratio of the whole answer, clipped to ${1 - low} … ${1 + high}`,
                   cispo: `ratio cut at ${1 + high}` };
  const ratio = updates === "free" ? "ratio not clipped" : bounds[surrogate];
  return [`A step: draw problems, and answers by chance; reward ${rewarded}; ${push}. Nothing ` +
          "else is said to the model.",
          `Temperature ${temperature}; advantage ${A}, r from 0 to 1; weight of a token ` +
          `${AVERAGES[average].words}, B = ${BATCH} answers; AdamW, learning rate ` +
          `${Number((rate * cfg.learningRate).toPrecision(3))}` +
          `${updates === "1" ? "; one update, every ratio is 1" : `; four updates, ${ratio}`}; ` +
          "no KL penalty."];
}

// ---- the settings ----------------------------------------------------------------------------

// Other settings for the next run; the address has them, too.
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
  byId("a-step").replaceChildren(...texts.map((text) => element("p", {}, text)));
  for (const key of Object.keys(SETTINGS)) byId(`set-${key}`).value = settings[key];
  const lever = leverOf(settings);
  const isUsual = addressOf(settings) === "";
  const name = lever?.name ?? labelOf(settings);
  byId("recipe").textContent = isUsual ? "" : `${name}. `;
  const chapter = element("a", { href: `path.html#${lever?.rung}` }, "The path has a chapter on it.");
  byId("watch").replaceChildren(lever?.watch ?? "", ...(lever?.rung ? [" ", chapter] : []));
  byId("from-link").textContent = isUsual ? "" : `Set: ${name}.`;
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
showLevers();
byId("mix-button").addEventListener("click", trainAnew);
addEventListener("hashchange", () => {
  if (location.hash.includes("=") && activity === null) change(settingsOf(location.hash));
});

// What of the page was picked, and what was measured about a push by hand.
if (stored.measured !== null) {
  const { base: baseRight, hand: { groups, asPushed, risen } } = stored.measured;
  byId("picked").textContent = `Of the ${EXAM_SIZE} problems of the exam the base gets ` +
    `${baseRight} right. The problem at the top is the first that it gets wrong and the trained ` +
    "policy right. The first run has seed 1; how others end is said at its end.";
  byId("by-hand").textContent = `In ${groups} such groups of the problem at the top, ` +
    `${inPercent(asPushed)} of the tokens whose chance changed by half a point or more moved ` +
    "where they were pushed; the others moved with weights that all tokens share. Of the wrong " +
    `answers ${inPercent(risen)} got likelier.`;
}

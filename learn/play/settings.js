// The levers and the settings on the page, and the texts about them.

// The lever with these settings, or undefined if there is none.
function leverOf(wanted) {
  const address = addressOf({ ...wanted, seed: USUAL.seed });
  return LEVERS.find(({ set }) => addressOf({ ...USUAL, ...set }) === address);
}

// A button that changes one thing and trains from the base.
function leverButton({ name, set, watch }) {
  const button = element("button", { class: "lever" },
                         element("b", {}, name), element("span", {}, watch));
  button.addEventListener("click", () => {
    change({ ...USUAL, ...set });
    trainAgain();
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

function trainAgain() {
  showStage();
  beginRun();
  train();
}

// ---- the texts about them --------------------------------------------------------------------

// Two texts for the end of a run: what its lever does, and the results with several seeds.
function textsAfter(settings) {
  const { measured } = stored;
  const lever = leverOf(settings);
  const isUsual = addressOf({ ...settings, seed: USUAL.seed }) === "";
  if (measured === null || !lever && !isUsual) return ["", ""];
  const usual = `with seeds 1 to ${measured.usual.length}: ${eachOf(measured.usual, "exam")}`;
  if (isUsual) return ["", `Exam results that we measured earlier, ${usual} of 100.`];
  const runs = measured.levers[lever.name];
  const others = measured.beside[lever.name];
  const more = others ? `; with ${lever.method}: ${eachOf(others, "exam")}` : "";
  return [lever.after((name) => eachOf(runs, name)),
          "Exam results that we measured earlier with this lever, with seeds 1 to " +
          `${runs.length}: ${eachOf(runs, "exam")} of 100${more}. Without a lever, ${usual}.`];
}

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
  byId("a-step").replaceChildren(...texts.map((text) => element("p", {}, text)));
  for (const key of Object.keys(SETTINGS)) byId(`set-${key}`).value = settings[key];
  const lever = leverOf(settings);
  const isUsual = addressOf(settings) === "";
  const name = lever?.name ?? labelOf(settings);
  byId("recipe").textContent = isUsual ? "" : `${name}. `;
  const chapter = element("a", { href: `path.html#${lever?.rung}` },
                          "The path has a chapter about this.");
  byId("watch").replaceChildren(lever?.watch ?? "", ...(lever?.rung ? [" ", chapter] : []));
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
showLevers();
byId("mix-button").addEventListener("click", trainAgain);
addEventListener("hashchange", () => {
  if (location.hash.includes("=") && activity === null) change(settingsOf(location.hash));
});

// Which problem the page shows at the top, and what was measured about a single push.
if (stored.measured !== null) {
  const { base: baseRight, hand: { groups, asPushed, risen } } = stored.measured;
  byId("picked").textContent = `Of the ${EXAM_SIZE} problems of the exam, the base gets ` +
    `${baseRight} right. The problem at the top is the first one that the base gets wrong and ` +
    "the trained policy gets right. Your first run has seed 1; at its end you see the results of " +
    "other seeds, too.";
  byId("by-hand").textContent = `We tried this with ${groups} groups of answers to the problem ` +
    "at the top. Of the tokens whose probability changed by half a percentage point or more, " +
    `${inPercent(asPushed)} moved in the direction in which they were pushed; the others were ` +
    `moved by weights that all tokens share. Of the wrong answers, ${inPercent(risen)} became ` +
    "more likely.";
}

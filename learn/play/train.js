// Training: the batch as squares, the curve, the events, and the result.

let settings = settingsOf(location.hash);       // of the next run
let run = freshRun();   // the run that is shown
const earlier = [];     // earlier runs, whose curves stay
let activity = null;    // "training", "exam", "counting" or null
let isStopping = false; // whether the reader asked to pause; it pauses after the current step
let baseScore = null;   // how many problems of the exam the base gets right
let yoursIs = "";       // label of the run that made the reader's policy

// ---- the loop --------------------------------------------------------------------------------

// A run of newRun(), with what the page adds to it. greedy: its answer to the problem at the top
function freshRun() {
  return { ...newRun(base, settings), greedy: guess, seen: new Set(), events: [], ended: null,
           exam: null };
}

// Begin again with the base. The curve of the last run stays if it has more than one step. If these
// settings were run before, the seed changes.
function beginRun() {
  if (run.log.length > 1) earlier.push(run);
  const known = new Set(earlier.map((one) => addressOf(one.settings)));
  while (known.has(addressOf(settings)) && Number(settings.seed) < 99) {
    settings = { ...settings, seed: String(Number(settings.seed) + 1) };
  }
  run = freshRun();
  layOutSquares();
  showSettings();
  showRun();
}

// Run one step, then show it. The squares wait for the end of the step, so that squares and numbers
// always belong to the same step.
async function oneStep() {
  const start = performance.now();
  const groups = [];
  for (const group of trainStep(run)) {
    if (group !== null) groups.push(group);
    await breathe();
  }
  run.greedy = answerTo(run.policy, problem.prompt);
  run.seconds += (performance.now() - start) / 1000;
  newEvents(run, run.seen).forEach(addEvent);
  const isRight = verify(problem.answer, run.greedy.text) === 1;
  if (isRight && !run.seen.has("top") && run.log.length > 1) {
    run.seen.add("top");
    addEvent("For the first time, the answer to the problem at the top is right.");
  }
  run.ended = reasonToStop(run);
  groups.forEach(showGroup);
  showCounts();
  showRun();
}

// All events of one step get the same number.
function addEvent(text) {
  const step = run.log.length;
  const last = run.events.at(-1) ?? { step: 0, number: 0 };
  run.events.push({ step, text, number: last.number + Number(step > last.step) });
  say(text);
}

// Train until the run ends or the reader pauses it. A run that has ended takes the exam.
async function train(numSteps = Infinity) {
  if (run.log.length === 0 || run.ended !== null) beginRun();
  activity = "training";
  isStopping = false;
  showButtons();
  for (let i = 0; i < numSteps && !isStopping && run.ended === null; i++) await oneStep();
  policies.yours = run.policy;
  yoursIs = `${labelOf(run.settings)}, ${plural(run.log.length, "step")}`;
  if (run.ended !== null) {
    activity = "exam";
    showButtons();
    showHeadline();
    baseScore ??= await examScore(base);
    run.exam = await examScore(run.policy);
    learnSpeed(run);
    say(`From ${baseScore} to ${run.exam} of ${EXAM_SIZE}.`);
  }
  activity = null;
  showButtons();
  showRun();
  const button = byId("train-button");      // it was disabled, which took away its focus
  if (document.activeElement === document.body) button.focus({ preventScroll: true });
  if (byId("asked").textContent !== "") askTyped();      // so that the reader's policy answers, too
}

async function examScore(policy) {
  let right = 0;
  for (right of examine(policy)) await breathe();
  return right;
}

// ---- the batch -------------------------------------------------------------------------------

// Draw 64 empty squares, with a box for each group.
function layOutSquares() {
  const G = Number(run.settings.group);
  const boxes = Array.from({ length: BATCH / G }, () => {
    const squares = Array.from({ length: G }, () =>
      element("span", { class: "square none", tabindex: -1, role: "img", "aria-label": "empty" }));
    return styled(element("div", { class: "group" }, squares), { "--columns": G });
  });
  byId("squares").replaceChildren(...boxes);
  byId("squares").querySelector(".square").tabIndex = 0;
  byId("batch-title").textContent = `${BATCH} answers, ${G} to each problem (a box)`;
  showCounts();
}

const KINDS = ["thinks right", "thinks wrong", "guesses right", "guesses wrong"];

// Show the answers of a group in its box, beginning with those that think.
function showGroup(group, index) {
  const box = byId("squares").children[index];
  const answers = group.texts.map((text, i) => ({ i, kind:
    `${thinks(text) ? "thinks" : "guesses"} ${group.isRight[i] ? "right" : "wrong"}` }));
  answers.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
  box.classList.toggle("teaches", teaches(group));
  answers.forEach(({ i, kind }, place) => {
    const square = box.children[place];
    square.className = `square ${kind}`;
    square.setAttribute("aria-label", kind);
    square.about = () => aboutAnswer(group, i);
    if (square.hasAttribute("aria-describedby")) showTip(square);
  });
}

// The text that a square shows about its answer.
function aboutAnswer({ prompt, answer, texts, A, rewards }, i) {
  const parts = texts[i].split(/(?<=[;>])/).flatMap((part) => [part, element("wbr")]);
  return [element("code", {}, prompt), element("p", {}, element("code", {}, parts)),
          verdictOf(answer, texts[i]),
          element("small", {}, `reward ${rewards[i].toFixed(2)}, advantage ${signed(A[i])}`)];
}

// Show the number of squares of each kind, next to a sample of the kind.
function showCounts() {
  const rowOfCount = (look, selector, name) => element("li", {}, element("span", { class: look }),
    element("b", {}, String(byId("squares").querySelectorAll(selector).length)), name);
  byId("counts").replaceChildren(
    ...KINDS.map((kind) => rowOfCount(`square ${kind}`, "." + kind.replace(" ", "."),
                                      kind.replace(" ", ", "))),
    rowOfCount("frame", ".teaches", "framed boxes: rewards differ, so they give a gradient"));
}

// ---- the curve -------------------------------------------------------------------------------

const ROW = 14;         // height of a row of a label

// Draw the share of right answers at each step, with the curves of earlier runs behind it. A dashed
// line shows what explains it: the reward or, if that is for right answers, how many think first.
function showCurve() {
  const box = byId("curve");
  const width = Math.max(260, box.clientWidth);
  const most = Math.floor((width / 2.4 - 10) / 7.2);        // characters in a row of a label
  const lines = curveLines().map((line) =>
    ({ ...line, rows: line.text.match(new RegExp(`.{1,${most}}( |$)`, "g")) }));
  const rows = lines.flatMap((line) => line.rows);
  const widest = Math.max(...rows.map((row) => row.length), 9);
  const [left, right, top, bottom] = [38, 10 + 7.2 * widest, 14, 26];
  const height = Math.max(width > 420 ? 320 : 190, top + bottom + ROW * rows.length);
  const longest = Math.max(40, ...lines.map(({ log }) => log.length));
  const x = (step) => left + (width - left - right) * step / longest;
  const y = (share) => top + (height - top - bottom) * (1 - share);

  const rulers = [0, 0.5, 1].flatMap((share) => [
    element("line", { x1: left, x2: width - right, y1: y(share), y2: y(share) }),
    element("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`)]);
  const feet = [10, 20, 30, 40, 50, 60].filter((step) => step <= longest).map((step) =>
    element("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, String(step)));
  const paths = lines.map(({ kind, log, metric }) => element("path", { class: kind,
    d: "M" + log.map((_, i) => [x(i + 1), y(smoothed(log, metric, i + 1))].join(" ")).join("L") }));
  const marks = marksOf(x, y).map(({ number, ...at }) => element("g", {},
    element("circle", { cx: at.x, cy: at.y, r: 8 }),
    element("text", { x: at.x, y: at.y + 4, "text-anchor": "middle" }, String(number))));
  const dashed = run.settings.reward === "right" ? "answers that think first" : "mean reward";
  byId("curve-title").textContent =
    `Share of right answers, and ${dashed} (dashed), at each step, mean of three steps`;
  const title = run.log.length === 0 ? "Right answers: none yet" :
    `Right answers, after ${plural(run.log.length, "step")}: ` +
    inPercent(smoothed(run.log, "right"));
  box.replaceChildren(element("svg", { viewBox: `0 0 ${width} ${height}`, width, height,
                                       role: "img", "aria-label": title },
    rulers, feet, paths, placed(lines, x, y, height - bottom, width - right), marks));
}

function isUsual({ settings }) {
  return addressOf(settings) === "";
}

// The runs behind this one: the usual run and the last six others. If the reader has not trained
// the usual run to its end, we add the one that we measured.
function runsBehind() {
  const { curve, usual } = stored.measured ?? {};
  const behind = earlier.filter((one, i) => isUsual(one) || i >= earlier.length - 6);
  const ended = earlier.filter(({ exam }) => exam !== null);
  if (!curve || [...ended, run].some(isUsual)) return behind;
  return [{ settings: USUAL, log: curve.map((right) => ({ right: right / BATCH })),
            exam: usual[0].exam }, ...behind];
}

// The lines of the chart, each with the label at its end: earlier runs, then this one's dashed line
// and its right answers.
function curveLines() {
  const nameOfRun = (one) => isUsual(one) ? "usual run" : labelOf(one.settings);
  const lines = runsBehind().map((one) => ({
    text: nameOfRun(one) + (one.exam === null ? "" : `: exam\u00a0${one.exam}`), log: one.log,
    kind: isUsual(one) ? "ghost usual" : "ghost", metric: "right" }));
  const { log } = run;
  if (log.length === 0) return lines;
  const dashed = run.settings.reward === "right" ?
    { text: `${inPercent(smoothed(log, "thinks"))}\u00a0think first`, metric: "thinks" } :
    { text: `reward ${smoothed(log, "reward").toFixed(2)}`, metric: "reward" };
  lines.push({ ...dashed, kind: "paid", log });
  const name = lines.length > 0 ? `${nameOfRun(run)}: ` : "";
  const share = inPercent(smoothed(log, "right"));
  return [...lines, { text: `${name}${share}\u00a0right`, kind: "now", log, metric: "right" }];
}

// The places of the events' numbers: on the curve, or above or below it if the last is too near.
function marksOf(x, y) {
  const marks = [];
  for (const { step, number } of run.events) {
    const before = marks.at(-1) ?? { number: 0, x: -Infinity, y: 0 };
    if (number === before.number) continue;
    const at = { number, x: x(step), y: y(smoothed(run.log, "right", step)) };
    if (at.x - before.x < 17 && Math.abs(at.y - before.y) < 17) {
      at.y = before.y + (at.y > before.y ? 17 : -17);
    }
    marks.push(at);
  }
  return marks;
}

// Labels at the ends of lines or, if there are several lines, at the edge, to which a thin line
// leads. Their rows do not overlap, and are all above `floor`.
function placed(lines, x, y, floor, edge) {
  const ends = lines.map(({ rows, kind, log, metric }) => {
    const at = { x1: x(log.length), y1: y(smoothed(log, metric)) };
    return { rows, kind, ...at, x: (lines.length > 1 ? edge : at.x1) + 11, y: at.y1 };
  });
  ends.sort((a, b) => a.y - b.y);
  for (let i = 1; i < ends.length; i++) {
    ends[i].y = Math.max(ends[i].y, ends[i - 1].y + ROW * ends[i - 1].rows.length);
  }
  let limit = floor;
  for (const end of ends.reverse()) {
    end.y = Math.min(end.y, limit - ROW * (end.rows.length - 1));
    limit = end.y - ROW;
  }
  return ends.flatMap(({ rows, kind, x1, y1, x: left, y: middle }) => [
    element("line", { x1, y1, x2: left - 3, y2: middle }),
    element("text", { class: `label ${kind}` }, rows.map((row, i) =>
      element("tspan", { x: left, y: middle + 4 + ROW * i }, row)))]);
}

// ---- the state of a run -----------------------------------------------------------------------

function showRun() {
  showHeadline();
  showSame();
  showEvents();
  showCurve();
  showEnd();
}

// Show in large letters how far the run is, or its result.
function showHeadline() {
  const [large, ...small] = headlineOf();
  byId("headline").replaceChildren(element("strong", {}, large),
                                   ...small.map((text) => element("span", {}, text)));
  byId("stage").classList.toggle("ended", run.exam !== null);
}

function headlineOf() {
  const step = run.log.length;
  if (step === 0) return ["Nothing learned yet", "this is the base"];
  const time = `${run.seconds.toFixed(1)} s`;
  if (run.exam !== null) {
    const ours = measuredRuns(run.settings);
    return [`From ${baseScore} to ${run.exam} of ${EXAM_SIZE}`,
            `problems that it never trained on, after ${plural(step, "step")} ` +
            `in this tab, ${time}`, ...(ours ? [`With these settings, ${ourExams(ours)}`] : [])];
  }
  if (activity === "exam") return ["Exam", `${EXAM_SIZE} problems that it never trained on`];
  const { right, thinks, length, reward, sums, sumsRight } = run.log.at(-1);
  const paid = run.settings.reward === "right" ? "" : `, reward ${reward.toFixed(2)}`;
  const sumsToo = sums > 0 ? `, ${inPercent(sumsRight, sums)} of their sums are right` : "";
  return [`${Math.round(BATCH * right)} of ${BATCH} right`,
          `step ${step}, ${time}, ${Math.round(BATCH * thinks)} think first${sumsToo}, ` +
          `${Math.round(length)} tokens per answer${paid}`];
}

// Show how the policy now answers the problem of the first screen.
function showSame() {
  const { greedy: { tree, text, completion: { tokens, nodes } }, exam, log } = run;
  const isOver = exam !== null;
  const when = log.length > 0 ? `after step ${log.length}` : "";
  byId("same-step").textContent = isOver ? "after training" : when;
  byId("same").querySelector(".tokens")?.remove();
  const line = emptyLine("answer now");
  tokens.forEach((id, t) => addToken(line, id, tree.next[nodes[t]]));
  byId("same").append(line);
  const was = element("small", {}, "before ", verdictOf(problem.answer, guess.text));
  showVerdict(byId("same"), element("span", { class: "verdict" }, isOver ? was : null,
                                    verdictOf(problem.answer, text)));
}

function showEvents() {
  byId("events").replaceChildren(...run.events.map(({ number, text }) => element("li", {},
    element("i", {}, String(number)), element("span", {}, text))));
}

// Show what the experiment did, why the run ended, and what to do next.
function showEnd() {
  byId("end").hidden = run.exam === null;
  if (run.exam === null) return;
  const why = {
    learned: `It stopped because enough of these were right in the last ${RECENT} steps.`,
    silent: `It stopped because no group gave a gradient in ${SILENT} steps.`,
    limit: `It stopped after ${LIMIT} steps, the most that a run may take.`,
  }[run.ended];
  const [because, results] = textsAfter(run.settings);
  const parts = commandOf(run.settings, cfg)?.split(/ (?=--)/) ?? [];
  const command = parts.flatMap((part) => [" ", element("code", { class: "whole" }, part)]);
  const measures = "In the exam, the model takes the most likely tokens. The curve shows answers " +
    "drawn at random, as the mean of three steps. ";
  const facts = `${measures}${why}${results}${parts.length > 0 ? " The same in Python:" : ""}`;
  byId("end-text").replaceChildren(...linked(because || textOnSums(run)));
  byId("end-facts").replaceChildren(facts, ...command);
  byId("to-experiments").textContent =
    experimentOf(run.settings) ? "Another experiment" : "Now break it";
  byId("link").href = "#" + addressOf(run.settings);
  byId("link").textContent = "Copy link";
}

// ---- the buttons -----------------------------------------------------------------------------

function showButtons() {
  const isTraining = activity === "training";
  const isPaused = run.ended === null && run.log.length > 0;
  const label = isTraining ? "Pause" : activity === "exam" ? "Exam" :
    isPaused ? "Continue" : run.log.length === 0 ? "Train" : "Train again";
  for (const id of ["begin", "train-button"]) {
    byId(id).textContent = label;
    byId(id).disabled = activity !== null && (!isTraining || isStopping);
  }
  byId("step-button").textContent = isTraining || isPaused ? "One step" : "First step";
  byId("start-over").hidden = !isPaused || isTraining;
  const controls =
    "#step-button, #start-over, #mix-button, #mix select, #count, .experiment button";
  for (const control of document.querySelectorAll(controls)) control.disabled = activity !== null;
}

function pressTrain() {
  if (activity === "training") {
    isStopping = true;
    showButtons();
  } else if (activity === null) {
    train();
  }
}

function showStage() {
  byId("stage").scrollIntoView();
  byId("train-button").focus({ preventScroll: true });
}

byId("begin").addEventListener("click", () => {
  showStage();
  pressTrain();
});
byId("train-button").addEventListener("click", pressTrain);
byId("step-button").addEventListener("click", () => train(1));
byId("link").addEventListener("click", async (event) => {
  event.preventDefault();
  history.replaceState(null, "", byId("link").href);
  const copying = navigator.clipboard?.writeText(location.href);
  const result = await copying?.then(() => "Link copied", () => null);
  byId("link").textContent = result ?? "The link is in the address bar";
});
byId("start-over").addEventListener("click", trainAgain);

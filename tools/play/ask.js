// Ask them: one problem, answered by each policy side by side, token by token.

let problem = sampleProblem(Math.random, true, cfg);    // { prompt, answer }, asked in all sections

// A card with the answer of a policy, which grows as it is written. said: the verdicts so far
async function writeAnswer(name, card, said) {
  const verdict = element("strong");
  const line = emptyLine(`answer of ${name}`);
  const facts = element("small");
  const head = element("h3", { class: `dot ${name}` }, name);
  card.replaceChildren(element("div", { class: "split" }, head, verdict), line, facts);

  const tree = new Tree(policies[name]);
  const isGreedy = byId("ask-mode").value === "greedy";
  const uniforms = isGreedy ? null : uniformNumbers(cfg.T, Math.random);
  const { answer, prompt } = problem;
  for (const [completion] of rollout(tree, [prompt], uniforms)) {
    if (!card.isConnected) return;                      // something else has been asked
    const { tokens, nodes } = completion;
    addToken(line, tokenElement(tokens.at(-1), tree.next[nodes.at(-1)]));
    if (tokens.at(-1) === cfg.EOS || tokens.length === cfg.T) {
      showVerdict(verdict, answer, completionText(completion, cfg));
      said[name] = verdict.textContent;
      say(Object.entries(said).map((pair) => pair.join(": ")).join("; "));
      facts.append(factsOf(tree, completion));
    }
    if (mayMove) await pause(28);
  }
}

// What the verifier says of an answer.
function showVerdict(node, answer, text) {
  const found = extract(text);
  if (answer === null) {
    node.append("not a sum that can be checked");
  } else if (verify(answer, text)) {
    node.classList.add("good");
    node.append(`✓ right: ${found}`);
  } else {
    node.classList.add("bad");
    node.append(found === null ? "✗ no answer" : `✗ wrong: ${found}, not ${answer}`);
  }
}

function factsOf(tree, completion) {
  const likelihood = Math.exp(logLikelihood(tree, completion));
  const entropy = mean(completion.nodes.map((node) => tree.next[node].entropy));
  return `${completion.tokens.length} tokens · all of it was ${percent(likelihood)} likely · ` +
         `entropy ${entropy.toFixed(2)} nats a token`;
}

// Let all policies answer the problem.
function answerAll() {
  const { answer, prompt } = problem;
  if (answer === null) {
    byId("truth").textContent = "No sum of whole numbers with + − * and brackets: they will " +
                                "answer, but nobody can check it.";
  } else {
    const isKept = hasTaskForm(prompt) && isHeldOut(prompt);
    const note = isKept ? " The problem was kept from training." : "";
    byId("truth").textContent = `The right answer is ${answer}.${note}`;
  }
  const names = Object.keys(policies);
  const cards = names.map(() => element("div", { class: "card" }));
  byId("answers").replaceChildren(...cards);
  const said = {};
  names.forEach((name, i) => writeAnswer(name, cards[i], said));
}

// Ask another problem everywhere.
function pose(next) {
  problem = next;
  byId("problem").value = problem.prompt;
  answerAll();
  sampleGroup();
  showLiveAnswer();
}

// A problem as the policies have read them, of what people type.
function normalized(typed) {
  const prompt = typed.replace(/\s/g, "").replace(/[×·]/g, "*").replace(/[−–]/g, "-");
  return prompt.endsWith("=") ? prompt : prompt + "=";
}

// Ask what was typed, if it is short enough.
function poseTyped() {
  const prompt = normalized(byId("problem").value);
  const length = utf8.encode(prompt).length;
  if (length > cfg.promptWidth) {
    byId("truth").textContent = `This has ${length} bytes with its =; the policies have never ` +
      `read more than ${cfg.promptWidth}. Below are still the answers to ${problem.prompt}`;
  } else {
    pose({ prompt, answer: solve(prompt) });
  }
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  poseTyped();
});
byId("ask-mode").addEventListener("change", answerAll);
for (const button of document.querySelectorAll(".draw")) {
  button.addEventListener("click", () => pose(sampleProblem(Math.random, true, cfg)));
}

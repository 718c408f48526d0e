// The first screen: one problem, the base's guess and a wrong sum of its thought, and the trained
// policy's answer.

const problem = firstProblem(base, trained);
const guess = answerTo(base, problem.prompt);

for (const node of document.querySelectorAll(".the-problem")) {
  node.textContent = problem.prompt.replace("=", " = ?");
}
byId("the-answer").textContent = problem.answer;
const slip = sumsOf(answerTo(base, problem.prompt, null, thought(cfg)).text).find(
  ({ isRight }) => !isRight);
byId("slip").hidden = slip === undefined;
byId("slip").querySelector("code").textContent = slip?.sum ?? "";
writeAnswer(byId("before"), problem.answer, guess);
writeAnswer(byId("after"), problem.answer, answerTo(trained, problem.prompt));

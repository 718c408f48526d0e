// The link "Search" of the pages that the theme does not build leads here, and opens the search.
if (location.hash === "#__search") {
  addEventListener("load", () => document.querySelector(".md-search__button").click());
}
// On a phone, each row of a table with long texts, or of one that is wider than the phone, becomes a
// card, whose lines name their columns.
for (const table of document.querySelectorAll("article table:not([class])")) {
  const names = Array.from(table.querySelectorAll("th"), (cell) => cell.textContent);
  const cells = Array.from(table.querySelectorAll("td"));
  const isWide = table.scrollWidth > table.closest("article").clientWidth;
  if (isWide || cells.some((cell) => cell.textContent.length > 50)) {
    table.dataset.cards = "";
    for (const cell of cells) {
      const isNumber = /^\d/.test(cell.textContent);
      const needsName = isNumber || (names.length > 2 && cell.cellIndex > 0);
      if (needsName) cell.dataset.name = names[cell.cellIndex];
    }
  }
}
// A text in columns is not wrapped.
for (const code of document.querySelectorAll("article pre > code")) {
  code.classList.toggle("columns", /\S {2,}\S+ {2,}\S/.test(code.textContent));
}
// A line never breaks inside a flag.
for (const code of document.querySelectorAll("article code:not(:has(span[class]))")) {
  code.innerHTML = code.innerHTML.replace(/--\w+/g, "<span class=whole>$&</span>");
}

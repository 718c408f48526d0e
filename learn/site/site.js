// Open the search, where the link "Search" of the other pages leads.
if (location.hash === "#__search") {
  addEventListener("load", () => document.querySelector(".md-search__button").click());
}

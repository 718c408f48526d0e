// The scheme of a page: as the system, light, or dark. The button in the header chooses the next one,
// and all pages keep it. The theme of the site stores it under the same name.
const SCHEMES = [["", "default", "light dark"], [": light", "default", "light"],
                 [": dark", "slate", "dark"]];
let scheme = 0;

function useScheme(index) {
  scheme = index;
  document.documentElement.style.colorScheme = SCHEMES[index][2];
}

try {
  const key = Object.keys(localStorage).find((name) => name.endsWith(".__palette") &&
    location.pathname.startsWith(name.replace(".__palette", "")));
  const { media } = JSON.parse(localStorage[key]).color;
  useScheme(SCHEMES.findIndex(([end]) => media === `(prefers-color-scheme${end})`));
} catch { /* nothing was chosen, or the browser forbids it, as for some files */ }

addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("scheme");
  button.hidden = false;
  button.addEventListener("click", () => {
    useScheme((scheme + 1) % 3);
    const [media, name] = SCHEMES[scheme];
    const key = new URL(".", document.querySelector(".home").href).pathname + ".__palette";
    localStorage[key] = JSON.stringify({ index: scheme, color: {
      media: `(prefers-color-scheme${media})`, scheme: name, primary: "indigo", accent: "indigo" } });
  });
});

const rootOf = () => new URL(".", document.querySelector(".home").href).href;

// In a clone, make site may have built the folder site/: one of its images loads if it has.
function findSite(ifBuilt, ifNot) {
  const image = new Image();
  image.addEventListener("load", ifBuilt);
  image.addEventListener("error", ifNot);
  image.src = `${rootOf()}site/docs/zoo.svg`;
}

// A browser shows Markdown and code as plain text. So in a clone without site/, the header has no tab that
// leads to such a file, and another link to one opens a note. With site/, they open their pages there.
addEventListener("DOMContentLoaded", () => {
  if (location.protocol !== "file:" || !document.querySelector("nav [hidden]")) return;
  findSite(() => {
    for (const tab of document.querySelectorAll("nav [hidden]")) tab.hidden = false;
    document.querySelector("nav > span").remove();
  }, () => {});
});

addEventListener("click", (event) => {
  const link = event.target.closest("a[href]:not(dialog a)");
  if (!link || location.protocol !== "file:" || !/\.(md|py)$/.test(link.pathname)) return;
  event.preventDefault();
  const root = rootOf();
  const name = link.href.slice(root.length).split("#")[0];
  const page = name.replace("README.md", "index.md").replace(/\.md$/, "") + ".html" + link.hash;
  const isNewTab = event.ctrlKey || event.metaKey || event.shiftKey;
  findSite(() => open(`${root}site/${page}`, isNewTab ? "_blank" : "_self"), () => {
    const note = document.createElement("dialog");
    note.innerHTML = `<p><code></code> is a text file. Type <code>make site</code> in your clone: it makes
      pages of all such files, and this link then opens one.</p>
      <p><button>Close</button> <a>Open the text</a></p>`;
    note.querySelector("code").textContent = name;
    note.querySelector("a").href = link.href;
    note.querySelector("button").addEventListener("click", () => note.close());
    note.addEventListener("close", () => note.remove());
    document.body.append(note);
    note.showModal();
  });
});

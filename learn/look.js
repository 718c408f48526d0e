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

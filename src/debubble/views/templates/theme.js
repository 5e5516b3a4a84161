  // Dark or light: as the system has it, as the button says, or as the address ends (#dark, #light); other ends of the
  // address are searched (#2F5).
  const system = window.matchMedia("(prefers-color-scheme: dark)"), themed = [];
  const asked = decodeURIComponent(window.location.hash.slice(1));

  function setTheme(name) {
    if (name) document.documentElement.dataset.theme = name;
    for (const draw of themed) draw();
  }
  system.addEventListener("change", () => setTheme());
  document.getElementById("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (system.matches ? "dark" : "light");
    setTheme(now === "dark" ? "light" : "dark");
  });
  setTheme(["dark", "light"].find(name => name === asked));

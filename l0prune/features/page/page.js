// A click on a column's header sorts by that column; a second click reverses the order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    const value = (row) => {
      const cell = row.cells[column];
      const text = cell.dataset.value ?? cell.textContent;
      const number = Number(text.replaceAll(",", ""));
      return text.trim() === "" || Number.isNaN(number) ? text : number;
    };
    const order = (a, b) =>
      typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => order(value(a), value(b)));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}

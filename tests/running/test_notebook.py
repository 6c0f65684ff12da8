import re

from rich.table import Table
from rich.text import Text

from l0prune.running.environment import as_html


def test_a_table_is_one_element_whose_text_is_escaped(capsys):
    table = Table("name", title="Cut")
    table.add_row(Text("<script>alert('x')</script> & [bold]more"))
    html = as_html(table)
    assert html.startswith("<pre style=")
    assert html.endswith("</pre>")
    assert set(re.findall(r"</?(\w+)", html)) <= {"pre", "span"}
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; [bold]more" in html
    assert capsys.readouterr().out == ""

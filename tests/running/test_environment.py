import re
import sys

from rich.table import Table
from rich.text import Text

from l0prune.running.environment import as_html, command, environment


def test_a_command_is_as_one_would_type_it():
    assert command(["/usr/bin/l0prune", "run", "a b.toml"]) == "l0prune run 'a b.toml'"
    assert command(["/x/l0prune/__main__.py", "export"]) == "l0prune export"
    assert command(["/home/me/train.py", "--lr", "1"]) == "python train.py --lr 1"
    assert command(["-c"]) == command([]) == ""


def test_versions_are_those_that_run():
    found = environment()
    assert found["versions"]["torch"] == sys.modules["torch"].__version__.partition("+")[0]
    assert found["versions"]["python"] == sys.version.split()[0]


def test_a_table_is_one_element_whose_text_is_escaped(capsys):
    table = Table("name", title="Cut")
    table.add_row(Text("<script>alert('x')</script> & [bold]more"))
    html = as_html(table)
    assert html.startswith("<pre style=")
    assert html.endswith("</pre>")
    assert set(re.findall(r"</?(\w+)", html)) <= {"pre", "span"}
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; [bold]more" in html
    assert capsys.readouterr().out == ""

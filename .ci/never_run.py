"""Print the tests that were skipped in all of the given JUnit reports, with the reason."""

import sys
from xml.etree import ElementTree

ran, reasons = set(), {}
for path in sys.argv[1:]:
  for case in ElementTree.parse(path).iter("testcase"):
    file, name = case.get("classname"), case.get("name")  # a skipped file has only a name
    skipped = case.find("skipped")
    if skipped is None or skipped.get("type") == "pytest.xfail":
      ran |= {file, f"{file}.{name}"}
    else:
      message = skipped.get("message")
      reason = skipped.text if message == "collection skipped" else message
      reasons[f"{file}.{name}".lstrip(".")] = reason

never = sorted(reasons.keys() - ran)
print(f"skipped in every environment: {len(never)}")
for test in never:
  print(f"  {test}: {reasons[test]}")

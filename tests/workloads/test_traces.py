"""Trace files: what is right is read whole, what is broken is refused with its line."""

import json
import re

import pytest

from pdlab.core.errors import WorkloadError
from pdlab.workloads import traces

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8", "2023-11-16 18:17:05.5,12,1"]


def azure_file(tmp_path, text, name="AzureLLMInferenceTrace_code.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_azure_rows_become_arrivals_after_the_first(tmp_path, end, bom):
    w = traces.azure(azure_file(tmp_path, bom + end.join([HEADER.strip(), *ROWS]) + end))
    assert [(round(i.arrival_s, 6), i.prompt_tokens, i.max_tokens) for i in w] == [
        (0, 4808, 10),
        (0.052, 3180, 8),
        (1.52004, 12, 1),
    ]
    assert {i.kind for i in w} == {"code"}
    assert w.items[0].sampling().ignore_eos


def test_limit_and_longest_choose_requests(tmp_path):
    path = azure_file(tmp_path, HEADER + "\n".join(ROWS))
    assert len(traces.azure(path, limit=2)) == 2
    assert [i.prompt_tokens for i in traces.azure(path, longest=3500)] == [3180, 12]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        (HEADER, None),
        ("time,in,out\n" + ROWS[0], 1),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,31", 3),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,3180,8,9", 3),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,many,8", 3),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,-3,8", 3),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,3,0", 3),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04.03,3,1.5", 3),
        (HEADER + "yesterday,3,8", 2),
        (HEADER + ROWS[1] + "\n" + ROWS[0], 3),
        (HEADER + "\n".join([*ROWS, ROWS[1]]), 5),
        (HEADER + ROWS[0] + "\n2023-11-16 18:17:04+00:00,3,8", 3),
        (HEADER.encode() + b"2023-11-16 18:17:04,3,8\n\xff\xfe,3,8", None),
    ],
)
def test_a_broken_azure_file_names_the_line(tmp_path, text, line):
    with pytest.raises(WorkloadError) as e:
        traces.azure(azure_file(tmp_path, text))
    assert e.value.hint
    if line is not None:
        assert re.search(rf"line {line}\b", e.value.message), e.value.message


def mooncake_line(t, prompt, output, hashes):
    return json.dumps({"timestamp": t, "input_length": prompt, "output_length": output, "hash_ids": hashes})


def test_mooncake_prompts_share_blocks_of_equal_hashes(tmp_path):
    path = tmp_path / "conversation_trace.jsonl"
    path.write_text("\n".join([mooncake_line(500, 1100, 5, [7, 8, 9]), mooncake_line(2000, 1300, 6, [7, 8, 1]), ""]))
    w = traces.mooncake(path)
    from pdlab.workloads.prompts import prompt_of

    a, b = (prompt_of(item, n, 1000) for n, item in enumerate(w))
    assert [i.arrival_s for i in w] == [0.0, 1.5]
    assert (len(a), len(b)) == (1100, 1300)
    assert a[:1024] == b[:1024]
    assert a[1024:1100] != b[1024:1100]


@pytest.mark.parametrize(
    "second",
    [
        '{"timestamp": 1, "input_length": 5',
        "[1, 2]",
        '{"timestamp": 1, "input_length": 5}',
        mooncake_line(-1, 5, 5, []),
        mooncake_line("1", 5, 5, []),
        mooncake_line(1, 0, 5, []),
        mooncake_line(1, 5, True, []),
        mooncake_line(1, 5.5, 5, []),
        mooncake_line(1, 5, 5, ["a"]),
        mooncake_line(1, 5, 5, [-4]),
        mooncake_line(1, 5, 5, 3),
        mooncake_line(0, 5, 5, []) + "\n" + mooncake_line(-5, 5, 5, []),
        '{"timestamp": NaN, "input_length": 5, "output_length": 5}',
    ],
)
def test_a_broken_mooncake_file_names_the_line(tmp_path, second):
    path = tmp_path / "t.jsonl"
    path.write_text(mooncake_line(0, 5, 5, []) + "\n" + second + "\n")
    with pytest.raises(WorkloadError, match=r"t\.jsonl, line [23]"):
        traces.mooncake(path)


def test_a_mooncake_file_whose_time_falls_names_the_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_line(t, 5, 5, []) for t in (10, 20, 15)))
    with pytest.raises(WorkloadError, match="line 3: time falls"):
        traces.mooncake(path)


def test_a_missing_file_says_where_files_come_from(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        traces.azure(tmp_path / "nothing.csv")

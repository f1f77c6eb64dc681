"""Turn text into token shards, train a tokenizer, look at a data set.

shoal data prepare books/ --out data/books --eval-fraction 0.01
shoal data prepare 'web/*.jsonl.zst' --tokenizer tokenizer.json --out data/web --skip-bad
shoal data tokenizer books/ --vocab-size 8192 --out tokenizer.json
shoal data info data/books --verify --sample 2
shoal data look run.yaml --step 100
shoal data tasks arithmetic needle-4k --count 500 --out tasks
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from shoal.cli.data import look, tasks
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.data.prepare.data_set import Prepared
    from shoal.data.prepare.units import Reading

_INPUTS = "text, JSONL (also .gz, .zst) or Parquet files, folders, patterns, what `datasets` saved to disk, hf:NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="prepare|tokenizer|info|look|tasks", required=True)
    from shoal.data.prepare.memory_limit import FORMULA

    prepare = verbs.add_parser("prepare", help="turn text into token shards", epilog=FORMULA)
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS)
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="folder of the data set; a rerun goes on where one stopped"
    )
    prepare.add_argument(
        "--tokenizer", default="byte", metavar="T", help="byte (default), a tokenizer.json, or a folder with one"
    )
    prepare.add_argument(
        "--eos", metavar="TOKEN", help="token that ends a document, where the tokenizer leaves that open"
    )
    prepare.add_argument(
        "--start", metavar="TOKEN", help="token that starts a document (default: the tokenizer's own, else --eos); none"
    )
    prepare.add_argument(
        "--special", action="store_true", help="special tokens spelled out in the text become their ids"
    )
    prepare.add_argument(
        "--eval-fraction", type=float, metavar="F", help="hold out this share: writes DIR/train and DIR/eval"
    )
    prepare.add_argument(
        "--prompt-field", metavar="F", help="field that comes before the text and is no training target"
    )
    _add_reading(prepare)
    prepare.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    prepare.add_argument("--shard-tokens", type=int, metavar="N", help="largest shard (default: 268,435,456 tokens)")
    prepare.add_argument("--overwrite", action="store_true", help="replace a data set that was made from other input")
    prepare.add_argument("--json", action="store_true", help="print the summary as JSON")

    tokenizer = verbs.add_parser("tokenizer", help="train a byte-level BPE tokenizer")
    tokenizer.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS)
    tokenizer.add_argument("--out", required=True, metavar="DIR|FILE", help="folder, or the tokenizer.json itself")
    tokenizer.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="tokens in all (default: 8192)")
    tokenizer.add_argument(
        "--reserved", type=int, metavar="N", help="special tokens <|reserved_0|>… that are free for later (default: 16)"
    )
    tokenizer.add_argument("--max-mb", type=float, metavar="N", help="learn from a sample of about this many megabytes")
    _add_reading(tokenizer)
    tokenizer.add_argument("--json", action="store_true", help="print the summary as JSON")

    info = verbs.add_parser("info", help="what is in a data set")
    info.add_argument(
        "folder", metavar="DIR", help="a prepared data set (or the folder of its train and eval), or s3://…"
    )
    info.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    info.add_argument("--sample", type=int, default=0, metavar="N", help="print the beginning of N documents")
    info.add_argument("--seq-len", type=int, metavar="L", help="padding and cut documents in windows of L tokens")
    info.add_argument("--json", action="store_true", help="print as JSON")

    look.add_arguments(
        verbs.add_parser("look", help="windows as the model sees them: tokens, documents, positions, what is learnt")
    )
    tasks.add_arguments(verbs.add_parser("tasks", help="write made evaluation tasks: arithmetic, needles, brackets …"))


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", default="auto", choices=("auto", "text", "jsonl", "parquet", "hf"), help="default: by ending"
    )
    parser.add_argument(
        "--text-field", default="text", metavar="F", help="field or column with the text (default: text)"
    )
    between = parser.add_mutually_exclusive_group()
    between.add_argument(
        "--separator", metavar="S", help=r"what stands between the documents of a text file, e.g. '\n\n\n'"
    )
    between.add_argument("--per-line", action="store_true", help="each line of a text file is a document")
    parser.add_argument("--split", default="train", help="split of a Hugging Face dataset (default: train)")
    parser.add_argument("--config", metavar="NAME", help="configuration of a Hugging Face dataset")
    parser.add_argument("--revision", metavar="R", help="revision of a dataset on the hub (default: the newest)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read, and count it")
    parser.add_argument(
        "--max-document-mb", type=int, default=16, metavar="N", help="refuse longer documents (default: 16 MiB)"
    )
    parser.add_argument(
        "--buffer-mb",
        type=int,
        default=128,
        metavar="N",
        help="refuse zstandard windows and Parquet pages that are larger (default: 128 MiB)",
    )
    parser.add_argument(
        "--max-growth",
        type=int,
        default=200,
        metavar="N",
        help="refuse packed files that hold more than N times their size (default: 200)",
    )


def run(args: argparse.Namespace) -> int:
    # `datasets` imports torch wherever it is installed, for seconds and for nothing; this is how to decline.
    os.environ.setdefault("USE_TORCH", "0")
    return {"prepare": _prepare, "tokenizer": _tokenizer, "info": _info, "look": look.run, "tasks": tasks.run}[
        args.verb
    ](args)


def _reading(args: argparse.Namespace) -> Reading:
    from shoal.data.prepare.units import Reading

    separator = "\n" if args.per_line else args.separator
    if separator is not None:
        separator = separator.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    prompt = getattr(args, "prompt_field", None)
    return Reading(
        args.text_field,
        prompt,
        separator,
        args.split,
        args.config,
        args.revision,
        args.max_document_mb,
        args.buffer_mb,
        args.max_growth,
    )


def _prepare(args: argparse.Namespace) -> int:
    from shoal.data.prepare.data_set import DEFAULT_SHARD_TOKENS, Options, prepare

    options = Options(
        tokenizer=args.tokenizer,
        eos=args.eos,
        start=args.start,
        special=args.special,
        format=args.format,
        reading=_reading(args),
        eval_fraction=args.eval_fraction,
        shard_tokens=DEFAULT_SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
        skip_bad=args.skip_bad,
        overwrite=args.overwrite,
        workers=args.workers,
    )
    prepared = prepare(args.inputs, args.out, options)
    print(json.dumps(_as_json(prepared), indent=1) if args.json else _as_text(prepared))
    return 0


def _as_json(prepared: Prepared) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "already": prepared.already,
        "documents": prepared.documents,
        "tokens": prepared.tokens,
        "skipped": prepared.skipped,
        "sets": {
            side: {
                "path": str(path),
                "documents": index.documents,
                "tokens": index.tokens,
                "shards": len(index.shards),
                "vocab_size": index.vocab_size,
                "start_id": index.start_id,
                "eos_id": index.eos_id,
                "fingerprint": index.fingerprint,
            }
            for side, (path, index) in prepared.sets.items()
        },
        "work": asdict(prepared.work),
    }


def _as_text(prepared: Prepared) -> str:
    from shoal.data.starts import said
    from shoal.readable import count, duration, size

    lines = ["already prepared; nothing to do" if prepared.already else "prepared"]
    for path, index in prepared.sets.values():
        lines.append(
            f"  {path}: {index.documents:,} documents, {count(index.tokens)} tokens of {index.vocab_size:,} "
            f"({size(index.size_bytes)}, shards: {len(index.shards)})"
        )
    lines.append(f"  {said(index.start_id, index.eos_id)}")
    for reason, entry in prepared.skipped.items():
        lines.append(f"  skipped {entry['count']:,}: {reason}, first at {entry['first']}")
    work = prepared.work
    if work.seconds:
        lines.append(
            f"  in {duration(work.seconds)}: {work.text_bytes / work.seconds / 1e6:.1f} MB/s, "
            f"{count(work.tokens / work.seconds)} tokens/s; processes: {work.workers}, with at most "
            f"{size(work.peak_rss_bytes)} of memory together (bound: {size(work.bound_bytes)})"
        )
    return "\n".join(lines)


def _tokenizer(args: argparse.Namespace) -> int:
    from shoal.data.prepare.tokenizer_train import RESERVED, Lesson, train_tokenizer

    reserved = RESERVED if args.reserved is None else args.reserved
    lesson = Lesson(args.inputs, args.vocab_size, _reading(args), args.format, args.skip_bad, args.max_mb, reserved)
    trained = train_tokenizer(lesson, args.out)
    if args.json:
        print(json.dumps(trained))
        return 0
    ratio = f"{trained['bytes_per_token']:.2f} bytes of text a token"
    print(f"wrote {trained['path']}: {trained['vocab_size']:,} tokens, {ratio}")
    for reason, entry in trained["skipped"].items():
        print(f"  skipped {entry['count']:,}: {reason}, first at {entry['first']}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from shoal.data.info import describe, describe_text

    if args.seq_len is not None and args.seq_len < 1:
        raise UsageError(f"--seq-len {args.seq_len}: a window has at least one token.")
    found = describe(args.folder, verify=args.verify, sample=args.sample, seq_len=args.seq_len)
    print(json.dumps(found, indent=1) if args.json else describe_text(found))
    return 0

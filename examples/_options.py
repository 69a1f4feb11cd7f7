"""The command line that the short examples share."""

import argparse


def parse(description, arms, *, steps, batch, tiny_batch, length):
    """Read the options of a comparison of `arms`; options that make no sense end the
    program with a message.
    """
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument(
        "--steps", type=int, default=steps, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=batch,
        help=f"windows of {length} characters a step (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and batches (default: 0)"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=arms, default=list(arms), help="(default: all)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=f"4 steps on {tiny_batch} windows: does it run at all?",
    )
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch = 4, tiny_batch
    if args.steps < 2 or args.batch < 1:
        parser.error(
            "--steps has to be 2 or more (the first one compiles), --batch 1 or more"
        )
    return args

"""`vllm serve`, which asks for the metadata of a distribution that vLLM for CPUs is not called."""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    ServeSubcommand().validate(arguments)
    ServeSubcommand.cmd(arguments)

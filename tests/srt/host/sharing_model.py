"""A rank that shares a host tier with two others, its model, and its faults."""

import time

import rank_processes
from model_kinds import KINDS, pool_of, publish_server
from test_hybrid_tree import prompt
from tree_model import build

from sgl_kvpool.transfer.host_options import HostTierOptions

RANKS, PAGE_SIZE, TOKENS = 3, 4, 128
SHORT, LONGER, OTHER = prompt(8), prompt(28), prompt(20, 500)
#: Seconds that a slow rank adds to each transfer.
SLOW = 0.2


class Rank(rank_processes.Rank):
    def __init__(self, cases, rank, folder):
        super().__init__(rank, folder, RANKS)
        self.cases = cases
        #: Process groups that SGLang passes to a tree (`kv_cache_builder.py:402`), with --tp-size 3.
        self.groups = {
            "tp_cache_group": self.all, "attn_tp_cache_group": self.all,
            "attn_cp_cache_group": self.alone, "pp_cache_group": self.alone,
        }  # fmt: skip

    def model(
        self, layout="fp4", arrangement="layer_major", host="same", page_size=PAGE_SIZE, store=None,
        ratio=1.0, drafts=0, chosen=False,
    ):  # fmt: skip
        args = publish_server(
            self.patch, rank=self.rank, page_size=page_size, store=store, shared="node", hicache_ratio=ratio,
            tp_size=RANKS,
        )  # fmt: skip
        given = KINDS["dense"], layout, page_size, TOKENS // page_size
        options = {"host_tier": HostTierOptions(host, sharing="node", may_unshare=chosen)}
        # Drafts keep layer_major, whatever the target's arrangement.
        packed = tuple(pool_of(*given, draft="dense", **options) for _ in range(drafts))
        return build(args, self.groups, pool_of(*given, arrangement=arrangement, **options), packed=packed)

    def result_of(self, case):
        return self.cases[case](self)

    def is_slow_at(self, model, direction):
        """Delay this rank's transfers in one direction."""
        for channel in getattr(model.tier._channels, direction):
            run = channel.run

            def slow(*args, _run=run, **kwargs):
                time.sleep(SLOW)
                _run(*args, **kwargs)

            self.patch.setattr(channel, "run", slow)

    def counts_stored_pages(self, model):
        """Lists, for the target and each draft, that collect the host pages of this rank's backups."""
        kept = []
        for channel in model.tier._channels.to_host:
            run, own = channel.run, []
            kept.append(own)

            def counted(transfer, *rest, _run=run, _own=own):
                _own.extend(int(page) for page in transfer.host_pages)
                _run(transfer, *rest)

            self.patch.setattr(channel, "run", counted)
        return kept

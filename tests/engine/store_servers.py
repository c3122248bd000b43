"""Servers one after the other over one store, Mooncake's or NIXL's: the next finds what the first stored."""

import os
import signal
import sys
from pathlib import Path

from cluster_questions import PAGE_SIZE, PAGES, PROMPTS, failures, with_store
from programs import printed_by

from sgl_kvpool.commands.evaluate.measure import ask
from sgl_kvpool.demo.cluster.mooncake_store import MooncakeStore
from sgl_kvpool.demo.cluster.servers import until

HERE = Path(__file__).resolve().parent
#: Bytes of a page of `fp4`: 3 layers of 64 rows of 416 bytes, padding and checksum.
FP4_PAGE_BYTES = 81920
#: The damaged page of the damaged prompt.
BAD_PAGE = 4


def page_keys(text):
    """SGLang's keys of a prompt's pages."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return get_storage_hash_str(list(text.encode()), None, page_size=PAGE_SIZE)[:PAGES]


def change(store, key):
    """Replace a stored page by one with a changed byte, in a process of its own."""
    printed_by([sys.executable, HERE / "change_page.py", key, "1234"], 120, **store.environment)


def mooncake(_model_path, folder):
    """A server fills the store, a fresh one reads it; a page is damaged, and the store is killed."""
    folder.mkdir()
    with MooncakeStore(folder) as store:
        with with_store(folder, "first", "fp4", store.environment, "mooncake") as first:
            answers = {"info": first.info(), "first": [ask(first, text) for text in PROMPTS[:4]]}
            until(lambda: len(store.page_keys()) == 4 * PAGES, "four prompts in the store")
            answers["stored_bytes"] = store.stored_bytes()
            answers["first_failures"] = failures(first)
        answers["keys"] = store.page_keys()
        (bad,) = [key for key in answers["keys"] if page_keys(PROMPTS[1])[BAD_PAGE] in key]
        change(store, bad)
        with with_store(folder, "second", "fp4", store.environment, "mooncake") as second:
            answers["second"] = [ask(second, PROMPTS[0])]
            answers["before_damage"] = failures(second)
            answers["second"].append(ask(second, PROMPTS[1]))
            answers["damaged"] = failures(second)
            answers["second"].append(ask(second, PROMPTS[2]))
            store.service.process.send_signal(signal.SIGKILL)
            answers["second"].append(ask(second, PROMPTS[3]))
            answers["killed"] = failures(second)
            # Nothing can be stored any more.
            answers["later"] = ask(second, PROMPTS[4])
            answers["later_again"] = ask(second, PROMPTS[4])
            store.master.process.send_signal(signal.SIGKILL)
            answers["last"] = ask(second, PROMPTS[5])
            answers["after"] = ask(second, PROMPTS[0])
    return answers


def nixl_server(folder, name, layout, direct_io=True):
    """A server over NIXL's POSIX files, not deleted on a full disk; O_DIRECT is NIXL's default."""
    extra = '{"plugin": {"posix": {"active": true}}, "l3_cleaner_enabled": false%s}'
    extra %= "" if direct_io else ', "use_direct_io": false'
    environment = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(folder / "files")}
    options = ("--hicache-storage-backend-extra-config", extra)
    return with_store(folder, name, layout, environment, "nixl", *options)


def nixl_files(folder, key=""):
    """Files of the store, of one key or of all."""
    found = sorted(path for path in (folder / "files").rglob("*") if path.is_file())
    return [path for path in found if key in path.name]


def nixl(layout, direct_io=True):
    """A job: a server fills the folder, files are damaged, a fresh server reads it."""

    def job(_model_path, folder):
        folder.mkdir()
        with nixl_server(folder, "first", layout, direct_io) as first:
            answers = {"first": [ask(first, text) for text in PROMPTS[:3]]}
            whole = [FP4_PAGE_BYTES] * (3 * PAGES)
            until(lambda: [p.stat().st_size for p in nixl_files(folder)] == whole, "whole files")
            answers["first_failures"] = failures(first)
            answers["first_arguments"] = " ".join(first.arguments)
            answers["first_log"] = first.log.read_text(errors="replace")
        answers["sizes"] = sorted({path.stat().st_size for path in nixl_files(folder)})
        answers["count"] = len(nixl_files(folder))
        # Cut and filled up with zeros, as a file system does after a crash; and cut short.
        (zeroed,) = nixl_files(folder, page_keys(PROMPTS[1])[BAD_PAGE])
        whole = zeroed.read_bytes()
        zeroed.write_bytes(whole[:4096].ljust(len(whole), b"\0"))
        (short,) = nixl_files(folder, page_keys(PROMPTS[2])[BAD_PAGE])
        os.truncate(short, 4096)
        with nixl_server(folder, "second", layout, direct_io) as second:
            answers["second"], answers["failures"] = [], []
            for text in PROMPTS[:3]:
                answers["second"].append(ask(second, text))
                answers["failures"].append(failures(second))
        return answers

    return job


JOBS = {"mooncake": mooncake, "nixl": nixl("fp4"), "nixl-buffered": nixl("fp4", direct_io=False)}

// Executes PTX for sm_90a on a CPU: the C interface, which ptxrun.py loads.

#include "parser.h"
#include "schedule.h"

namespace ptxrun {

static string quoted(const string& s) {
  string r = "\"";
  for (char ch : s) {
    if (ch == '"' || ch == '\\')
      r += '\\', r += ch;
    else if (ch == '\n')
      r += "\\n";
    else if ((u8)ch < 32)
      r += ' ';
    else
      r += ch;
  }
  return r + "\"";
}

// A JSON list of texts.
template <class List, class F>
static string list(const List& items, F text) {
  string j;
  for (auto& item : items)
    if (string one = text(item); !one.empty()) (j += j.empty() ? "" : ",") += one;
  return "[" + j + "]";
}

static char* handed(const string& s) {
  char* p = (char*)malloc(s.size() + 1);
  memcpy(p, s.c_str(), s.size() + 1);
  return p;
}

// The runs of bytes that a launch read or wrote: base of the region, first byte, bytes, 1 for writes.
static string touched(const Region& r) {
  string j;
  for (int write = 0; write < 2; write++) {
    const u32* cta = r.writer ? write ? r.writer : r.reader : nullptr;
    for (u64 b = 0, n = r.end - r.base; cta && b < n; b++) {
      if (!r.accessed[b >> kAccessedShift]) {
        b |= (1 << kAccessedShift) - 1;  // to read the array here would page it in
        continue;
      }
      if (!cta[b]) continue;
      u64 start = b;
      while (b < n && cta[b]) b++;
      j += (j.empty() ? "[" : ",[") + fmt("%llu,%llu,%llu,%d]", (unsigned long long)r.base, (unsigned long long)start,
                                         (unsigned long long)(b - start), write);
    }
  }
  return j;
}

struct CRegion {
  u64 base, size;
  u32 readonly, pad;
  const char* name;
};

static void check(const Func& f, u32 threads, const u32* grid, u32 param_bytes) {
  if ((int)param_bytes != f.param_bytes)
    throw Fault(fmt("kernel %s takes %d bytes of parameters, not %u", f.name.c_str(), f.param_bytes, param_bytes));
  if (!threads || threads > 1024) throw Fault(fmt("%u threads in a block", threads));
  int required = f.reqntid[0] * f.reqntid[1] * f.reqntid[2], most = f.maxntid[0] * f.maxntid[1] * f.maxntid[2];
  if (required && (int)threads != required)
    throw Fault(fmt("kernel %s requires %d threads, not %u", f.name.c_str(), required, threads));
  if (most && (int)threads > most)
    throw Fault(fmt("kernel %s runs with at most %d threads, not %u", f.name.c_str(), most, threads));
  for (int i = 0; i < 3; i++)
    if (!grid[i]) throw Fault("an empty grid");
}

extern "C" {
void ptx_free(char* p) { free(p); }

void* ptx_parse(const char* text, char** out) {
  auto m = std::make_unique<Module>();
  m->text = text;
  try {
    Parser(*m).module();
    int uid = 0;
    for (auto& f : m->funcs)
      for (auto& in : f.code) in.uid = uid++;
    string kernels = list(m->funcs, [](auto& f) {
      return "{\"name\":" + quoted(f.name) + ",\"params\":" + list(f.params, [](auto& q) {
               return fmt("{\"offset\":%d,\"size\":%d,\"float\":%d}", q.offset, q.size, (int)is_float(q.t));
             }) + fmt(",\"param_bytes\":%d}", f.param_bytes);
    });
    *out = handed("{\"kernels\":" + kernels + ",\"unsupported\":" + list(m->unsupported, quoted) + "}");
    return m.release();
  } catch (std::exception& e) {
    *out = handed(e.what());
    return nullptr;
  }
}

void ptx_delete(void* p) { delete (Module*)p; }

void ptx_launch(void* mod, const char* entry, const u32* grid, u32 threads, u32 dynamic, const u8* params,
                u32 param_bytes, const CRegion* regs, u32 nregs, const Config* c, char** out) {
  Module& m = *(Module*)mod;
  auto kernel = std::find_if(m.funcs.begin(), m.funcs.end(), [&](Func& f) { return f.name == entry; });
  string error;
  vector<Region> regions;
  vector<std::unique_ptr<u32, decltype(&free)>> shadows;
  for (u32 i = 0; i < nregs; i++)
    if (regs[i].size)
      regions.push_back({regs[i].base, regs[i].base + regs[i].size, (bool)regs[i].readonly, regs[i].name});
  std::sort(regions.begin(), regions.end(), [](auto& a, auto& b) { return a.base < b.base; });
  Machine x(m, *kernel, *c, regions);
  size_t uids = 0;
  for (auto& f : m.funcs) uids += f.code.size();
  x.stats.n.assign(uids, 0);
  x.stats.lanes = x.stats.units = x.stats.ideal = x.stats.bytes = x.stats.n;
  try {
    check(*kernel, threads, grid, param_bytes);
    u64 count = (u64)grid[0] * grid[1] * grid[2];
    if (c->touched || (c->global_races && count > 1))
      for (auto& r : regions) {
        size_t n = r.end - r.base;
        if ((r.readonly && !c->touched) || n > 1ull << 34) continue;
        auto shadow = [&](size_t items, size_t size) {
          shadows.emplace_back((u32*)calloc(items, size), &free);
          return shadows.back().get();
        };
        r.writer = shadow(n, 4);
        r.reader = shadow(n, 4);
        r.accessed = (u8*)shadow((n >> kAccessedShift) + 1, 1);
        if (!r.reader || !r.accessed) r.writer = nullptr;
      }
    int base = (SHARED_BASE + kernel->shared_bytes + m.dynamic_align - 1) / m.dynamic_align * m.dynamic_align;
    x.shared_limit = base + dynamic;
    if (x.shared_limit - SHARED_BASE > 227 * 1024)
      throw Fault(fmt("%d bytes of shared memory, more than 227 KB", x.shared_limit - SHARED_BASE));
    for (auto& d : m.dynamic_imms) d.first->fill((u64)(base + d.second));
    x.params = params;
    x.threads = threads;
    std::copy(grid, grid + 3, x.grid);
    for (u64 i = 0; i < count; i++) x.run_cta(i);
  } catch (std::exception& e) {
    error = e.what();
    if (error.find("\n  at ") == string::npos && x.current && x.now) error += "\n  at " + x.where(*x.current, *x.now);
  }
  size_t uid = 0;
  string lines = list(m.funcs, [&](const Func& f) {
    string j = list(f.code, [&](const Inst& in) {
      size_t i = uid++;
      if (!x.stats.n[i]) return string();
      string name = in.name;
      for (auto& s : in.mods) name += "." + s;
      string row = "[" + std::to_string(in.line) + ",\"" + class_names[in.cls] + "\"," + quoted(name);
      for (auto* of : {&x.stats.n, &x.stats.lanes, &x.stats.units, &x.stats.ideal, &x.stats.bytes})
        row += "," + std::to_string((*of)[i]);
      return row + "]";
    });
    return j.substr(1, j.size() - 2);
  });
  string reports = list(x.reports, [](auto& r) {
    return "{\"kind\":" + quoted(r.second.kind) + ",\"text\":" + quoted(r.second.text) +
           fmt(",\"count\":%llu}", (unsigned long long)r.second.count);
  });
  string bytes = c->touched ? list(regions, touched) : "[]";
  *out = handed("{\"error\":" + quoted(error) + ",\"reports\":" + reports +
                fmt(",\"instructions\":%llu", (unsigned long long)x.stats.instructions) + ",\"lines\":" + lines +
                ",\"touched\":" + bytes + "}");
}
}

}  // namespace ptxrun

import argparse, gc, gzip, os, pickle, random, sys, threading, time, json
import torch, torch.nn as nn, torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("name")
ap.add_argument("out")
ap.add_argument("--frac", type=float)
ap.add_argument("--max", type=int, default=2_000_000)
ap.add_argument("--late", action="store_true")
ap.add_argument("--stacks", action="store_true")
ap.add_argument("--steps", type=int, default=0)
a = ap.parse_args()
dev = "cuda"
torch.manual_seed(0)
random.seed(0)


def hist():
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc" if a.stacks else None, stacks="python", max_entries=a.max
    )


if not a.late:
    hist()
if a.frac:
    torch.cuda.set_per_process_memory_fraction(a.frac)
r = random.Random(1)


def mlp(d=1024, n=4):
    return nn.Sequential(
        *[m for _ in range(n) for m in (nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))]
    ).to(dev)


def multistream():
    m = mlp()
    opt = torch.optim.Adam(m.parameters())
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
    keep = []

    def step(i):
        with torch.cuda.stream(s1):
            x = torch.randn(r.choice([256, 512, 700, 1111]), 1024, device=dev)
            y = x * 2
            z = torch.randn(r.randrange(1, 4_000_000), device=dev)
        torch.cuda.current_stream().wait_stream(s1)
        x.record_stream(torch.cuda.current_stream())
        z.record_stream(s2)
        with torch.cuda.stream(s2):
            s2.wait_stream(s1)
            w = z.sin()
            torch.cuda._sleep(r.randrange(200_000, 20_000_000))
            w2 = torch.cat([w, z])
        w.record_stream(s1)
        w2.record_stream(torch.cuda.current_stream())
        del z
        keep.append(w2)
        if len(keep) > 3:
            keep.pop(r.randrange(3))
        loss = m(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        del x, y

    return step, 60


def threads():
    ms = [mlp(512, 3) for _ in range(3)]
    ss = [torch.cuda.Stream() for _ in ms]

    def work(k, i):
        rr = random.Random(i * 7 + k)
        with torch.cuda.stream(ss[k]):
            for _ in range(6):
                x = torch.randn(rr.randrange(50, 3000), 512, device=dev)
                l = ms[k](x).sum()
                l.backward()
                x.record_stream(ss[(k + 1) % 3])

    def step(i):
        t = [threading.Thread(target=work, args=(k, i)) for k in range(3)]
        [x.start() for x in t]
        [x.join() for x in t]

    return step, 25


def graphs():
    m = mlp(512, 3)
    state = {}

    def capture(n, pool=None):
        x = torch.randn(n, 512, device=dev)
        s = torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(2):
                m(x)
        torch.cuda.current_stream().wait_stream(s)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=pool):
            y = m(x)
            z = torch.cat([y, y * 2])
            q = z.softmax(-1).sum()
        return g, x, y, q

    def step(i):
        k = i % 7
        if k == 0:
            state["a"] = capture(r.randrange(100, 3000))
        if k == 1:
            state["b"] = capture(r.randrange(100, 3000), state["a"][0].pool())
        if k == 2:
            state["c"] = capture(4096)
        for v in list(state.values()):
            v[1].normal_()
            v[0].replay()
            float(v[3])
        x = torch.randn(r.randrange(100, 5000), 512, device=dev)
        m(x).sum().backward()
        if k == 4:
            state.pop("b", None)
            gc.collect()
        if k == 5:
            torch.cuda.empty_cache()
        if k == 6:
            state.clear()
            gc.collect()
            torch.cuda.empty_cache() if i % 2 else None

    return step, 42


def compiled():
    m = mlp(512, 2)
    f = torch.compile(m, mode="reduce-overhead")

    def step(i):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn([128, 256, 640][i // 6 % 3], 512, device=dev)
        f(x).sum().backward()
        m.zero_grad()

    return step, 30


def mempool():
    pools = []
    m = mlp(512, 2)

    def step(i):
        if i % 5 == 0:
            pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(pools[-1]):
            x = torch.randn(r.randrange(1000, 9000), 512, device=dev)
            y = x * 2
            t = [torch.empty(r.randrange(1, 300_000), device=dev) for _ in range(20)]
        m(x).sum().backward()
        m.zero_grad()
        del t, x
        if i % 5 == 4:
            del y
            pools.pop(0)
            gc.collect()
        if i % 10 == 9:
            torch.cuda.empty_cache()

    return step, 40


def moe():
    E = 16
    d = 1024
    ex = nn.ModuleList(
        [nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(E)]
    ).to(dev)
    gate = nn.Linear(d, E).to(dev)
    opt = torch.optim.AdamW(list(ex.parameters()) + list(gate.parameters()))

    def step(i):
        x = torch.randn(r.choice([2048, 4096, 8192]), d, device=dev)
        w, j = gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            rows, k = (j == e).nonzero(as_tuple=True)
            if rows.numel():
                out = out.index_add(0, rows, ex[e](x[rows]) * w[rows, k, None])
        opt.zero_grad()
        out.square().mean().backward()
        opt.step()

    return step, 40


def gnn():
    d = 256
    l1, l2 = nn.Linear(d, d).to(dev), nn.Linear(d, d).to(dev)
    opt = torch.optim.SGD(list(l1.parameters()) + list(l2.parameters()), 0.1)

    def step(i):
        n, e = r.randrange(2000, 60000), r.randrange(10000, 500000)
        x = torch.randn(n, d, device=dev)
        s, t = torch.randint(0, n, (e,), device=dev), torch.randint(0, n, (e,), device=dev)
        for l in (l1, l2):
            x = torch.zeros_like(x).index_add(0, t, l(x)[s]).relu()
        u = torch.unique(t)
        loss = x[u].square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

    return step, 60


def rl():
    m = mlp(1024, 4)
    opt = torch.optim.Adam(m.parameters())

    def step(i):
        with torch.no_grad():
            kv = torch.randn(r.choice([4, 8, 16]), r.randrange(10, 400), 1024, device=dev)
            for _ in range(60):
                kv = torch.cat([kv, m(kv[:, -1:])], 1)
        torch.cuda.empty_cache()
        x = kv[:, :256].clone()
        del kv
        opt.zero_grad()
        m(x).square().mean().backward()
        opt.step()
        if i % 3 == 0:
            torch.cuda.empty_cache()

    return step, 40


def varlen():
    m = mlp(2048, 6)
    opt = torch.optim.AdamW(m.parameters(), foreach=True)

    def step(i):
        x = torch.randn(r.randrange(300, 9000), 2048, device=dev)
        opt.zero_grad(set_to_none=True)
        m(x).square().mean().backward()
        opt.step()

    return step, 40


step, n = globals()[a.name]()
ooms = 0
keep = []
if a.late:
    for i in range(3):
        step(i)
    hist()
for i in range(a.steps or n):
    try:
        step(i)
    except torch.OutOfMemoryError:
        ooms += 1
        gc.collect()
torch.cuda.synchronize()
s = torch.cuda.memory_stats()
snap = torch.cuda.memory._snapshot()
with gzip.open(a.out, "wb", 6) as f:
    pickle.dump(snap, f)
print(
    "RESULT",
    json.dumps(
        dict(
            job=a.name,
            out=os.path.basename(a.out),
            conf=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            frac=a.frac,
            total=torch.cuda.mem_get_info()[1],
            events=sum(map(len, snap["device_traces"])),
            ooms=ooms,
            retries=s["num_alloc_retries"],
            reserved=s["reserved_bytes.all.peak"],
            allocated=s["allocated_bytes.all.peak"],
            device_alloc=s["num_device_alloc"],
            size=os.path.getsize(a.out),
        )
    ),
    flush=True,
)
with open(a.out + ".stats.json", "w") as f:
    json.dump(s, f)
os._exit(0)

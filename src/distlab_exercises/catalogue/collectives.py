"""The exercises on collectives by hand, and over MPI."""

from distlab_exercises.catalogue.exercise import Exercise

CHAPTER = "collectives/README.md, chapter 4"
ALGORITHMS = "distlab.collectives.algorithms"
MESSAGES = (
    "Messages are `endpoint.send(tensor, rank)` and `endpoint.recv(tensor, rank)`; a send may wait for its receiver."
)

EXERCISES = [
    Exercise(
        name="broadcast",
        title="broadcast by hand: from one rank, along a tree, along a chain",
        minutes=30,
        chapter=CHAPTER,
        task=f"""Write three broadcasts. Each copies the tensor of rank `src` into `tensor` on all other ranks, for any
        number of ranks. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`. The tree takes as many rounds as log2 of the
        ranks, rounded up: in each round, every rank that has the tensor sends it to one that has not. You need not
        handle tensors that are not contiguous, for which `in_place` is imported.""",
        hints=(
            "Number the ranks from the root: relative = (rank - src) % size. Then the root is always 0.",
            "The tree: after the round with distance d = 1, 2, 4, …, the relative ranks below 2d have the tensor.",
            "In the round with distance d, relative rank r < d sends to r + d if there is one; r with d <= r < 2d "
            "receives from r - d.",
        ),
        takes=tuple(f"{ALGORITHMS}:broadcast_{name}" for name in ("naive", "tree", "ring")),
        functions="collective",
    ),
    Exercise(
        name="reduce",
        title="reduce and reduce-scatter by hand: to one rank, up a tree",
        minutes=30,
        chapter=CHAPTER,
        task=f"""Write two reduces. Each leaves the sum (or what `op` asks for) of all ranks' tensors in `tensor` on
        rank `dst`, and does not change the tensors of the other ranks. With the first of them, write
        `reducescatter_naive`, which leaves block r of the sum of all ranks' `tensor` (ranks, *shape of a block) in
        `scattered` on rank r. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `reduce_function(op, tensor.dtype)` returns a
        function `combine(a, b, out=c)`; `scratch_buffer(tensor)` is memory to receive into. You need not handle
        tensors that are not contiguous or have a wrong shape, for which `in_place` and `one_for_each_rank` are
        imported.""",
        hints=(
            "The tree of a broadcast, from the leaves to the root: distances d = …, 4, 2, 1.",
            "In the round with distance d, relative rank r with d <= r < 2d sends what it has to r - d, and is done.",
            "A rank in the middle of the tree must not add to its own `tensor`, which belongs to the caller: it adds "
            "to a copy.",
        ),
        takes=tuple(f"{ALGORITHMS}:{name}" for name in ("reduce_naive", "reduce_tree", "reducescatter_naive")),
        functions="collective",
    ),
    Exercise(
        name="all-reduce",
        title="all-reduce by hand: through one rank, a tree, a butterfly",
        minutes=45,
        chapter=CHAPTER,
        task="""Write three all-reduces. Each changes `tensor` in place on every rank, to the sum (or what `op` asks
        for) of all ranks' tensors, for any number of ranks. Messages are `endpoint.send(tensor, rank)` and
        `endpoint.recv(tensor, rank)`.

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `reduce_function(op, tensor.dtype)` returns a
        function `combine(a, b, out=c)`; `scratch_buffer(tensor)` is memory to receive into; `reduce_tree` and the
        other functions that are imported. A send may wait until its receiver receives: two ranks that both send
        first wait forever. You need not handle tensors that are not contiguous.""",
        hints=(
            "Two of the three are a reduce to rank 0, followed by a broadcast from it.",
            "The butterfly, for 4 ranks: first 0 and 1, and 2 and 3, exchange what they have; then 0 and 2, and 1 and "
            "3. After each round, both have the same sum, of twice as many tensors.",
            "The butterfly: in round k, rank r and rank r XOR 2^k exchange what they have; the one with the smaller "
            "number sends first, the other receives first. If the world is not a power of two, the ranks beyond the "
            "largest one send their tensors to r - core before, and receive the result after.",
        ),
        takes=tuple(f"{ALGORITHMS}:allreduce_{name}" for name in ("naive", "tree", "butterfly")),
        functions="collective",
    ),
    Exercise(
        name="gather",
        title="gather and all-gather by hand: to one rank, up a tree, to all ranks",
        minutes=40,
        chapter=CHAPTER,
        task=f"""Write two gathers. Each puts the tensor of every rank r into `gathered[r]` on rank `dst`; on other
        ranks `gathered` is None. Then two all-gathers, after which every rank has all tensors: each is a gather to rank
        0, and a broadcast of what it has. {MESSAGES}

        Given: `endpoint.get_rank()` and `endpoint.get_world_size()`; `scratch_buffer(tensor, count=n)` is memory
        for n tensors, (n, *tensor.shape).""",
        hints=(
            "In a tree, a rank sends everything that it has collected in one message, to save latency.",
            "With relative = (rank - dst) % size: in the round with distance d = 1, 2, 4, …, relative ranks that are "
            "odd multiples of d send their d tensors (or fewer, at the end of the ranks) to relative - d.",
            "The root has the tensors in the order of relative numbers then: rotate them by `dst`.",
        ),
        takes=tuple(f"{ALGORITHMS}:{kind}_{name}" for kind in ("gather", "allgather") for name in ("naive", "tree")),
        functions="collective",
    ),
    Exercise(
        name="ring",
        title="all-gather and reduce-scatter around a ring",
        minutes=45,
        chapter=CHAPTER,
        task="""Write two collectives in which every rank sends to the next one and receives from the one before, at the
        same time, size - 1 times. After `allgather_ring`, `gathered[r]` is rank r's tensor, on every rank. After
        `reducescatter_ring`, `scattered` on rank r is block r of the sum of all ranks' `tensor` (size, *shape of
        `scattered`); `tensor` stays as it is. The second and then the first are the all-reduce with the fewest bytes.

        Given: `shift(data, received, endpoint)` sends `data` to the next rank and receives from the one before into
        `received`; `reduce_function(op, dtype)` returns a function `combine(a, b, out=c)`; `scratch_buffer(tensor,
        number)` is memory, another for each number. You need not handle tensors that are not contiguous or have a wrong
        shape, for which `in_place` and `one_for_each_rank` are imported.""",
        hints=(
            "All-gather: in each turn, pass on what you have just received. In turn t, whose tensor is that?",
            "Reduce-scatter: a partial sum of block b starts at rank b + 1, and ends at rank b. Each rank on its way "
            "adds its own block b.",
            "All-gather, turn t: send row (rank - t) % size, receive row (rank - t - 1) % size. Reduce-scatter, turn "
            "t: send the partial sum, receive one, and add the own block (rank - t - 2) % size to it.",
        ),
        takes=tuple(f"{ALGORITHMS}:{name}_ring" for name in ("allgather", "reducescatter")),
        functions="collective",
    ),
    Exercise(
        name="all-reduce-ring",
        title="the all-reduce with the fewest bytes, around a ring",
        minutes=45,
        chapter=CHAPTER,
        task="""Write the ring all-reduce: every rank changes `tensor` in place to the sum (or what `op` asks for) of
        all ranks' tensors, for any number of ranks and elements. The tensor is cut into as many chunks as there are
        ranks. They travel around the ring twice: first each collects the sum of all ranks' chunks, then the sums are
        handed to all. In each of 2 (size - 1) turns, a rank sends one chunk to the next rank and receives one from the
        rank before, at the same time.

        Given: `endpoint.isend(tensor, rank)` and `endpoint.irecv(tensor, rank)` start a message, `.wait()` waits for
        it; `reduce_function(op, tensor.dtype)` returns a function `combine(a, b, out=c)`. Tensors in messages are
        contiguous, and `tensor` is. Ranks may have chunks of different sizes, also of none. Ignore the last two
        arguments, which are for large tensors.""",
        hints=(
            "flat.tensor_split(size) cuts the flat tensor into views, some of which have one element more.",
            "In turn t, rank r sends chunk (r - t) % size, and receives chunk (r - t - 1) % size: what it receives, it "
            "sends in the next turn.",
            "In the first size - 1 turns, add what arrives to the chunk; in the others it replaces the chunk.",
        ),
        takes=("distlab.collectives.ring:allreduce_ring",),
        functions="collective",
    ),
    Exercise(
        name="mpi",
        title="what naive tensor parallelism exchanges, over MPI",
        minutes=40,
        chapter="mpi/README.md, chapter 5",
        task="""Ranks that share a model hold parts of each layer. Write who holds which part, and what the ranks
        gather, cut and add up around W_o, forward and backward. The docstrings say what each function returns.

        Given: `comm.Split(key=..., color=...)` returns the communicator of the ranks with the same color, in the
        order of their keys; `comm.Allgather(src, dst)` puts all ranks' arrays one after another into `dst`;
        `comm.Reduce_scatter(src, dst, op=MPI.SUM)` adds up all ranks' `src`, and gives rank r its r-th part. MPI
        sends memory, not elements: arrays must be contiguous (`np.ascontiguousarray`). Errors for wrong arguments
        are left out of the check. It needs no mpirun, but mpi4py.""",
        hints=(
            "In a grid, ranks that share a model follow each other: the place in it is rank % mp_size.",
            "Gathered parts lie one after another along a new first axis. Which axis must they be joined along?",
            "np.concatenate(parts, axis=-1) joins what Allgather has put into np.empty((mp_size, *part.shape)). For "
            "the backward pass, np.stack(np.split(grad, mp_size, axis=-1)) has one block for each rank.",
        ),
        script="mpi/model/func_impl.py",
        takes=(
            "get_info",
            "naive_collect_forward_input",
            "naive_collect_forward_output",
            "naive_collect_backward_output",
            "naive_collect_backward_x",
        ),
        functions="mpi",
    ),
    Exercise(
        name="mpi-collectives",
        title="all-reduce and all-to-all by hand, over MPI",
        minutes=45,
        chapter="mpi/README.md, chapter 5",
        task="""Write three methods of a communicator: `myAllreduce` through rank 0, `ringAllreduce` around a ring, and
        `myAlltoall` with all messages at once. The docstrings say what each does, and which bytes it counts in
        `total_bytes_transferred`: those that this rank has sent and received.

        Given: `self.comm`, an MPI communicator, with `Send(array, rank, TAG)`, `Recv(array, rank, TAG)`,
        `Sendrecv(out, to, TAG, into, source, TAG)`, and `Isend` and `Irecv`, which return requests for
        `MPI.Request.Waitall(requests)`. `with buffers(src, dst, size) as (send, receive)` gives both arrays flat, in
        memory of their own; `reduce_function(op)` returns NumPy's function `combine(a, b, out=c)`;
        `self._segment(src)` is the number of elements for each rank. A send may wait for its receiver. It needs no
        mpirun, but mpi4py.""",
        hints=(
            "myAllreduce: all ranks but 0 send, then receive. Rank 0 receives from one rank after another into the "
            "same array, and adds up.",
            "ringAllreduce: np.array_split(receive, n) cuts the array into views. In turn t, rank r sends chunk (r - "
            "t) % n and receives chunk (r - t - 1) % n; in the first n - 1 turns it adds what arrives.",
            "myAlltoall: segment i of `src` goes to rank i, which puts it at segment `rank` of its `dst`. Start all "
            "receives and sends, then wait; copy the own segment.",
        ),
        script="mpi/mpi_wrapper/comm.py",
        takes=("Communicator",),
        keeps=(
            *("__init__", "Get_size", "Get_rank", "Barrier", "Split"),
            *("Allreduce", "Allgather", "Reduce_scatter", "Alltoall", "_segment", "_count"),
        ),
        cases=("myAllreduce", "ringAllreduce", "myAlltoall"),
        functions="mpi-collective",
    ),
]

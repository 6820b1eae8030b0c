"""Attempts at the exercises on collectives, by hand and over MPI."""

from support.exercises_attempts import Attempt

ATTEMPTS = {
    "all-reduce-ring": [
        Attempt(
            "slow",
            "1.9 times as long as this topology needs: the busiest rank has 2 messages, and needs 4",
            """from distlab.collectives.algorithms import allreduce_naive

allreduce_naive(tensor, op, endpoint)""",
        ),
        Attempt(  # right where the ranks divide the elements
            "wrong-sum",
            "and should have the sum of all",
            """from distlab.collectives.ring import allreduce_ring as by_ring

share = len(tensor) // endpoint.get_world_size()
by_ring(tensor[: share * endpoint.get_world_size()], op, endpoint)""",
        ),
    ],
    "mpi-collectives": [
        Attempt(
            "deadlock",
            "rank 0 waits to send to rank 1",
            changes={
                "self.comm.Sendrecv(out, (rank + 1) % size, TAG, arriving, (rank - 1) % size, TAG)": (
                    "self.comm.Send(out, (rank + 1) % size, TAG); self.comm.Recv(arriving, (rank - 1) % size, TAG)"
                )
            },
            only="ringAllreduce",
        ),
        Attempt(
            "count",
            "rank 1 counts 288 bytes, and has sent and received 192",  # the others count right
            changes={
                "self._count(2 * segment * src.itemsize)\n\n    def _segment": (
                    "self._count((2 + (self.Get_rank() == 1)) * segment * src.itemsize)\n\n    def _segment"
                )
            },
            only="myAlltoall",
        ),
        Attempt(
            "slow",
            "3 ranks, 25 elements: a rank sends and receives 936 bytes; around a ring, 576 are enough",  # not the last
            changes={
                "            receive[:] = send\n            chunks": (
                    "            if size > 2 > rank and send.size % size:\n"
                    "                self.comm.Sendrecv(send, 1 - rank, TAG, receive, 1 - rank, TAG)\n"
                    "                self.total_bytes_transferred += 2 * src.nbytes\n"
                    "            receive[:] = send\n            chunks"
                )
            },
            only="ringAllreduce",
        ),
        Attempt(
            "",
            "right on every rank",
            changes={
                "self.comm.Sendrecv(out, (rank + 1) % size, TAG, arriving, (rank - 1) % size, TAG)": (
                    "self.comm.Sendrecv(sendbuf=out, dest=(rank + 1) % size, "
                    "recvbuf=arriving, source=(rank - 1) % size)"
                ),
                "self.comm.Irecv(into[other], other, TAG)": "self.comm.Irecv(buf=into[other], source=other)",
                "self.comm.Isend(out[other], other, TAG)": "self.comm.Isend(buf=out[other], dest=other)",
                "self.comm.Recv(part, other, TAG)": "self.comm.Recv(part, other)",
                "self.comm.Send(send, 0, TAG)": "self.comm.Isend(send, 0).Wait()",
                "self.comm.Recv(receive, 0, TAG)": "self.comm.Irecv(receive, 0).Wait()",
                "self.comm.Send(receive, other, TAG)": "self.comm.Send(receive, other)",
            },
        ),
        Attempt(
            "exception",
            "failed: MPI sends memory, not elements: give a contiguous array",
            changes={"self.comm.Isend(out[other],": "self.comm.Isend(out.T.copy()[:, other],"},
            only="myAlltoall",
        ),
        Attempt(
            "half-message",
            "2 ranks, 24 elements: rank 0 began to send to rank 1 with tag 9, which never received it",
            changes={
                "            MPI.Request.Waitall(requests)\n": (
                    "            [self.comm.Isend(out[0], other, 9) for other in others]\n"
                    "            MPI.Request.Waitall(requests)\n"
                )
            },
            only="myAlltoall",
        ),
        Attempt(
            "wrong-row",
            "2 ranks, 24 elements: rank 1: row 1, where rank 1's segment should be, has something else",
            changes={"into[rank] = out[rank]": "into[rank] = out[0]"},
            only="myAlltoall",
        ),
        Attempt(
            "changed",
            "has another `src` than before",
            changes={
                "self._count(2 * segment * src.itemsize)\n\n    def _segment": (
                    "self._count(2 * segment * src.itemsize)\n        src[:] = dst\n\n    def _segment"
                )
            },
            only="myAlltoall",
        ),
        Attempt(
            "ignores-op",
            "2 ranks, 24 elements, MAX of int32: rank 0 has the sum of rank 0's, rank 1's, and should have the maximum",
            changes={
                "        combine = reduce_function(op)\n        with buffers": (
                    "        combine = np.add\n        with buffers"
                )
            },
            only="myAllreduce",
        ),
        Attempt(
            "no-messages",
            "1 rank, 24 elements: calls a collective of MPI's; write it with Send, Recv",
            changes={
                "        combine = reduce_function(op)\n        with buffers": (
                    "        self.comm.Allgather(src, dst)\n        with buffers"
                )
            },
            only="myAllreduce",
        ),
    ],
    "mpi": [
        Attempt(
            "wrong-result",
            "mp_size 2, dp_size 2: rank 2: returned other numbers than its own slice of the sum over the ranks",
            changes={
                "mp_comm.Reduce_scatter(terms, mine, op=MPI.SUM)": "mine[...] = mp_size * terms[mp_comm.Get_rank()]"
            },
        ),
        Attempt(
            "",
            "right on every rank of every grid",
            changes={
                "    mp_comm.Reduce_scatter(terms, mine, op=MPI.SUM)\n": (
                    "    total = np.empty_like(terms)\n    mp_comm.Allreduce(terms, total)\n"
                    "    mine[...] = total[mp_comm.Get_rank()]\n"
                )
            },
            only="backward_x",
        ),
        Attempt(
            "wrong-result",
            "returned NoneType, and should return its own slice",
            changes={"    return _slices(output_grad": "    _slices(output_grad"},
            only="backward_output",
        ),
        Attempt(
            "wrong-result",
            "returned (2, 3, 8), and should return its own slice: (2, 3, 4)",
            changes={"(output_grad, mp_size)[mp_group_idx].copy()": "(output_grad, mp_size)[0].base"},
            only="backward_output",
        ),
        Attempt(
            "wrong-result",
            "gets the ranks of mp_comm [3, 2] instead of [2, 3]",
            changes={"comm.Split(key=rank, color=dp_idx)": "comm.Split(key=-rank, color=dp_idx)"},
            only="get_info",
        ),
        Attempt(
            "wrong-result",
            "instead of [0, 1, 2, 3]",
            changes={"color=mp_idx": "color=dp_idx"},
            only="get_info",
        ),
        Attempt(
            "wrong-result",
            "gets part_in_dim of fc_o 16 instead of 8",
            changes={'if fc_layer == "fc_o":': "if False:"},
            only="get_info",
        ),
    ],
    "broadcast": [
        Attempt(
            "wrong-tensor",
            "has rank",
            changes={
                "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data, "
                "rank_at(relative_rank - distance))": (
                    "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data.clone(), "
                    "rank_at(relative_rank - distance))"
                )
            },
            only="broadcast_tree",
        ),
    ],
    "reduce": [
        Attempt(
            "changed",
            "no longer has its own tensor",
            changes={
                "torch.empty_like(data) if partial is data and relative_rank > 0 else partial": "partial",
                "in_place(tensor, is_changed=relative_rank == 0) as data:\n        partial = data": (
                    "in_place(tensor) as data:\n        partial = data"
                ),
            },
            only="reduce_tree",
        ),
        Attempt(
            "ignores-op",
            "2 ranks, root 1, MAX: rank 1 has the sum of rank 0's, rank 1's, and should have the maximum of all",
            changes={"            combine(data, received, out=data)": "            data += received"},
            only="reduce_naive",
        ),
        Attempt(
            "changed",
            "2 ranks: rank 0 no longer has its own `tensor`",
            changes={"scratch_buffer(tensor, 1).copy_(tensor) if rank == 0 else tensor": "tensor"},
            only="reducescatter_naive",
        ),
    ],
    "gather": [
        Attempt(
            "wrong-row",
            "where rank",
            changes={
                "            whole[dst:], whole[:dst] = parts[: size - dst], parts[size - dst :]": (
                    "            whole[:] = parts"
                )
            },
            only="gather_tree",
        ),
    ],
    "ring": [
        Attempt("wrong-sum", "rank", changes={"tensor[(rank - turn - 2) % size]": "tensor[(rank - turn - 1) % size]"}),
        Attempt(
            "ignores-op",
            "MAX: rank ",
            changes={"combine = reduce_function(op, tensor.dtype)": "combine = lambda a, b, out: out.copy_(a + b)"},
            only="reducescatter_ring",
        ),
    ],
    "all-reduce": [
        Attempt(  # right where the number of ranks is a power of two
            "wrong-sum",
            "3 ranks: rank 0 has the sum of rank 0's, rank 1's, without rank 2's",
            changes={"            combine(data, received, out=data)\n        for": "            pass\n        for"},
            only="butterfly",
        ),
        Attempt(
            "ignores-op",
            "2 ranks, MAX: rank 0 has the sum of rank 0's, rank 1's, and should have the maximum of all",
            changes={"combine = reduce_function(op, tensor.dtype)": "combine = lambda a, b, out: out.copy_(a + b)"},
            only="butterfly",
        ),
        Attempt("deadlock", "rank 0 waits to send to rank 1", changes={"if rank < partner:": "if True:"}),
    ],
}

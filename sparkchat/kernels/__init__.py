"""Kernels of the decode step, each beside its torch reference: ``<op>/{reference,kernel}.py``, chosen in ``<op>/``.

CPU tensors take the reference, CUDA tensors the Triton kernel; nothing falls back silently. Every call below writes
into tensors that the caller owns and allocates nothing when its workspace is given, waits for nothing, and takes
lengths, rows and settings from device tensors, so that it may stand inside a CUDA graph: what is fixed at capture are
shapes and keyword numbers. Row counts are those of the tensors given.

Shapes: N token rows, R requests, d hidden size, H query heads, K key heads, D head size, V target vocabulary, Vd draft
vocabulary, g drafts of a block, r Markov rank. Query heads are ordered [group, key head], rotary pairs lie side by
side (models/weights.py). "half" is bf16 or fp16; fp32 works everywhere and is exact (no tf32).

    from sparkchat.kernels.norm import add_rms_norm
    add_rms_norm(x, delta, weight, eps, out, tap=None)
        x [N, d] fp32, in place: x += delta. delta None, [N, d] half or fp32, or partial sums [S, N, d] fp32 of a split
        product, added in order. out [N, d] half or fp32 = rmsnorm(x) * weight. weight [d] fp32.
        tap [N, d] (row stride free) half or fp32 receives x after the addition: a tapped layer's feature.
        x None: the delta alone is normalised.

    from sparkchat.kernels.rope import write_qkv
    write_qkv(qkv, positions, rows, rope, cache, q, *, qk_norm=None, eps=0.0, pages=None)
        qkv [N, (H+2K)*D] half or fp32, or partial sums [S, N, ...] fp32; positions [N] int64 or int32;
        rows [N] int32 cache row of each token row, -1 writes no keys; rope [P, D] fp32, cosine and sine side by side
        (torch.view_as_real(RopeTable's table).flatten(1)); qk_norm [H+K, D] fp32 or None.
        cache [pages, 2K, slots, D]: one layer of a LayerStore (store.data[i]). pages None: cache row n is page n, and
        position p lies in its slot p mod slots; pages [cache rows, P] int32: the pages of a row in order, position p
        in slot p mod slots of the one it falls into, below P * slots. q [N, H, D] out.

    from sparkchat.kernels.attention import attention_workspace, decode_attention
    workspace = attention_workspace(max_rows, num_heads, head_dim, context, device)
    decode_attention(q, cache, starts, rows, positions, ends, out, workspace, *, max_rows, window=None, pages=None)
        starts [R+1] int32: first row of each request (an empty request is skipped; rows behind starts[R] are not
        touched); at most ``max_rows`` rows a request. rows, positions as above. ends [N] int32 or int64: keys at
        positions below it are seen (position + 1 when causal, the end of the block in a drafter's block). window None
        or keys seen. out [N, H, D]. Keys must have been written before. Works over spans of keys that begin at fixed
        positions: a row's bits depend on its own keys alone, not on rows beside it, the batch, or what is allocated.

    from sparkchat.kernels.gemm import gemm_splits, small_gemm
    small_gemm(x, weight, out, *, scales=None, bias=None, epilogue="none")
        y = x W^T + bias for x [N, k] half or fp32, N <= 64 (more rows work, in tiles of 64); weight [n, k] of x's
        dtype, or float8_e4m3fn with scales [ceil(n/128), ceil(k/128)] fp32.
        epilogue "none": out [N, n] half or fp32 = y. "add": out [N, n] fp32 += y. "silu_mul": weight is [gate; up],
        out [N, n/2] = silu(y_gate) * y_up. "partials": out [S, N, n] fp32 with S = gemm_splits(weight, epilogue):
        the sums over S parts of k, for add_rms_norm's delta and write_qkv's qkv, which add them in order.
        The order in which k is summed depends on the weight's shape alone, so a row's bits do not depend on N.

    from sparkchat.kernels.sampling import DrawSettings, Laws
    DrawSettings(temperature [R] fp32, top_k [R] int32 (0: all), top_p [R] fp32, min_p [R] fp32,
                 seeds [R] int64 (bits of the 64-bit seed), rounds [R] int64)
        Numbers are those of engine/rng.py. A temperature below 1e-5 is greedy.
    Laws(logits [M, V], peak, temperature, least, scale [M] fp32, last_tie [M] int32)
        the law of each row without its probabilities: p(v) = exp((z_v - peak) / temperature) * scale where
        z_v > least, or z_v == least and v <= last_tie; else 0. Laws.empty(logits) makes static buffers.

    from sparkchat.kernels.markov import MarkovBuffers, markov_block
    markov_block(base, w1, w2, anchors, settings, buffers, *, draft_to_target=None, hidden=None, confidence=None)
        base [R, g, Vd] fp32, in place: the Markov bias of the token before is added. w1 [V, r], w2 [Vd, r] half or
        fp32. anchors [R] int64. Fills buffers.tokens [R, g] int64 (target ids), buffers.index [R, g] int64 (draft
        ids), buffers.laws (the laws drawn from, rows r*g+k), and with hidden [R, g, d] and confidence (weight [d] or
        [d+r] fp32, bias [1] fp32 or None) buffers.confidence [R, g] fp32, the raw logits.
        w1 and w2 None: no sequential head.

    from sparkchat.kernels.accept import AcceptBuffers, accept_block
    accept_block(logits, starts, verify_lens, settings, buffers, *, drafts=None, draft_laws=None, draft_index=None,
                 target_to_draft=None, caps=None)
        logits [N, V] half or fp32: row starts[r] + i of request r stands behind its first i drafts; starts [R+1] int32;
        verify_lens [R] int32 drafts tested; drafts [R, g] int64; draft_laws, draft_index as markov_block leaves them;
        target_to_draft [V] int32 (draft id, or -1) with a draft vocabulary; caps [R] int32 or None.
        Fills buffers.accepted_len, full_len [R] int32, next_ids [R] int64, tokens [R, g+1] int64 (accepted drafts, the
        next token, then -1), p_draft, p_target [R, g] fp32, laws (the target's, per row), damaged [R] int32 (1: the
        logits are no numbers, up to the row of the next token; the request must end). The rule is that of
        engine/acceptance.py.

    from sparkchat.kernels.planner import plan_lengths
    plan_lengths(confidence, temperatures, limits, cost_ms, verify_lens, *, extra_rows=0, budget=None)
        confidence [R, g] fp32 raw logits, temperatures [g] fp32, limits [R] int32 (-1: no such request), cost_ms
        [rows+1] fp64: milliseconds of a step by its rows (entry 0 unused). Fills verify_lens [R] int32 by Algorithm 1
        with early stop, R*g <= 4096; with budget [1] int32 instead the ``budget`` likeliest drafts of the batch.

    DeepSeek V4's weights of 8 and 4 bits, in the order of tiles (kernels/tiles/packing.py)

    from sparkchat.kernels.fp8 import TiledFp8, fp8_linear, takes
    fp8_linear(x, weight, out, *, groups=1, is_rounded=False)
        weight TiledFp8.of(codes [n, k] float8_e4m3fn, scales [ceil(n/128), k/128] fp32), n a multiple of 32, k of 128
        (``takes``). x [N, groups*k] half, any N (tiles of 8, 16 or 32 rows); output group g reads input group g.
        out [N, n] half or fp32, or partial sums [weight.splits(N), N, n] fp32. is_rounded: x is rounded to e4m3 first.
        meeting: out lies where other ranks read it, and the launch ends when all ranks have written theirs.
        From 128 rows on the weight is expanded (fp8/expanded.py) and the library multiplies: bits may depend on N then.

    from sparkchat.kernels.fp8.joint import JointProduct
    parts, plain_parts, whole = JointProduct(TiledFp8, weight [n, k] half, whole_from)(x)
        weights of two formats that read the same rows, in one launch.

    from sparkchat.kernels.ranks import Meeting, publish, publish_sum
        messages between ranks, laid where all of them read, that end with a meeting; ranks/rows.py: rows of tables;
        ranks/exchange.py: rows that ranks push to each other and add within the kernel that reads them.

    from sparkchat.kernels.gate import Routing, route
    route(logits, routing, scale, *, bias=None, table=None, token_ids=None, arrived=None)
        logits [N, E] fp32, or partial sums [S, N, E]: small_gemm(x, gate weight, ..., epilogue="partials"). Fills
        Routing.empty(N, k, E, device): weights and chosen [N, k], experts ascending, and the lists by expert.

    from sparkchat.kernels.experts import ExpertBuffers, TiledExperts, add_parts, run_experts
    run_experts(x, weights, routing, buffers, *, limit, is_rounded=False, state=None)
        x [N, d] half, any N; an expert is read once for each 8 (N <= 8) or 16 of its rows. Fills buffers.parts
        [k+1, N, d] fp32: partial sums of the mixture, the shared expert's last. add_parts(parts, out) adds them.

    DeepSeek V4's streams and state (models/deepseek_v4/fused.py puts them together). rope [P, rope_dim] fp32 as above.

    from sparkchat.kernels.hyper import HyperWorkspace, PartList, StreamWeights, connect_streams, hyper_workspace
    connect_streams(streams, weights, workspace, *, output, mix, merged, next_mix, norm, norm_eps, out, taken, tap)
        merges a sub-block's output (whole, partial sums [P, N, d], a PartList of addresses: other ranks' parts, or
        ``Sent`` of ranks.exchange: this rank's, added to the others' on the way) into the residual streams [N, S, d],
        and reads and norms for the next one. One launch up to 24 rows, whose programs wait for each other, two beyond:
        the same bits.

    from sparkchat.kernels.row_places import RowPlaces, place_rows
    place_rows(token_ids, positions, cache_rows, ends, starts, *, window, is_block, repeats_last)
        which request rows are of, where that begins and what they see of a window, once for all layers.

    from sparkchat.kernels.latent_attention import LatentShape, latent_attention, latent_workspace, write_latents
    write_latents(latents, latent_norm, positions, rows, rope, cache, shape, *, low_rank, low_rank_norm, out)
        norms, turns, rounds and keeps latents in the window's ring; norms the low ranks of queries beside them.
    latent_attention(q, cache, rows, positions, first_seen, ends, rope, sinks, out, workspace, shape, *, context,
                     chosen=None)
        q as projected, whole or partial sums; window, entries and sinks in one softmax; outputs turned back. Two
        launches: spans of keys, then their fold; for many rows one, with the same bits. ``context`` bounds the
        positions: it decides how many programs start.

    from sparkchat.kernels.compressor import Pool, PoolShape, compress_rows
    compress_rows(pools, positions, rows, starts, span_starts, rope, shape, *, written=None)
        one or two compressors of a layer: keeps every row in its ring, writes the entries that close; with ``written``
        (LatentRows) does what write_latents does in the same launch.

    from sparkchat.kernels.indexer import IndexShape, choose_entries, index_scores_of
    choose_entries(q, weights, keys, positions, rows, starts, rope, scores, chosen, shape, *, context, most_per_request,
                   rotation=None)
        chosen [N, k] int32: the k best of the entries a row sees, ties to the earliest, where it sees more than k.

    from sparkchat.kernels.seats import PackedRows, enter_block, enter_rows, limit, settle
        A captured step's bookkeeping, a launch before the layers and one behind: verify lengths, packed rows with their
        embeddings, the record for the host, anchors and lengths of the next round. Over the tensors of
        engine/captured/state.py; the reference is engine/captured/step.py.

    from sparkchat.kernels.rope import write_context
    write_context(kv, positions, rows, rope, cache, *, k_norm=None, eps=0.0)
        keys and values of all layers of a drafter from target features: kv [N, L*2K*D] or partial sums, cache
        [L, cache rows, 2K, slots, D], k_norm [L, K, D] fp32.

Filters: buffers made with ``has_filters=True`` let all multiprocessors find the thresholds of top-k, top-p and min-p
together, by two more launches for every law (sampling/select.py). Without, a law with filters is as right and slow.

Programmatic dependent launch: within ``with sparkchat.kernels.launch.overlap(which):`` a kernel's start overlaps the
end of the one before it on the stream: of all (products then call their first weights into L2 meanwhile), or, with
``Overlap.SMALL``, of all but those that stream a large matrix; with ``Overlap.BEHIND`` launches are made ready early,
and each says whether the kernel behind it may start while its last programs run (``lets_next``). Capture inside the
block; all kernels here wait for what came before them before they read or write anything that changes, but for what a
caller says is settled (``is_settled``, launch.reads_ahead). Off unless asked for.

Where results do depend on what is beside a row: nowhere within one dtype and one weight shape, up to the 64 rows a
product takes in one tile and beyond; kernels and cuBLAS (which callers may take for many rows) sum in different orders.
"""

"""A row-major matrix in memory, as kernels see it."""

from std.sys import align_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime INTO_FIRST_CACHE = PrefetchOptions().for_read().high_locality().to_data_cache()
comptime INTO_SECOND_CACHE = PrefetchOptions().for_read().medium_locality(
).to_data_cache()


struct Matrix[dtype: DType](ImplicitlyCopyable, RegisterPassable):
    """Where a row-major matrix (or a part of one) begins, and its row stride."""

    comptime Start = Pointer[Scalar[Self.dtype], MutUntrackedOrigin]

    var start: Self.Start
    """The first element."""

    var stride: Int
    """Elements from one row to the next."""

    def __init__(out self, start: Self.Start, stride: Int):
        self.start = start
        self.stride = stride

    def __init__(
        out self, *, of: Pointer[mut=True, Scalar[Self.dtype], _], stride: Int
    ):
        """Look at memory that the caller keeps alive."""
        self.start = of.unsafe_origin_cast[MutUntrackedOrigin]()
        self.stride = stride

    @always_inline
    def part(self, row: Int, column: Int = 0) -> Self:
        """Return the part of this matrix that begins at an element."""
        return Self(
            self.start.unsafe_offset(row * self.stride + column), self.stride
        )

    @always_inline
    def every(self, step: Int) -> Self:
        """Return the rows 0, `step`, 2·`step` and so on."""
        return Self(self.start, step * self.stride)

    @always_inline
    def load[
        width: Int, alignment: Int = align_of[Scalar[Self.dtype]]()
    ](self, row: Int, column: Int) -> SIMD[DType.float32, width]:
        """Load neighbours of one row, widened to float32.

        Parameters:
            width: How many.
            alignment: Bytes that their address is known to be a multiple of.
        """
        return self.start.unsafe_load[width=width, alignment=alignment](
            row * self.stride + column
        ).cast[DType.float32]()

    @always_inline
    def prefetch[options: PrefetchOptions](self, row: Int, column: Int):
        """Ask for the line that holds an element, which need not exist."""
        prefetch[options](
            self.start.unsafe_offset(row * self.stride + column)
        )

    @always_inline
    def store(self, row: Int, column: Int, value: Scalar[Self.dtype]):
        """Store one element."""
        self.start[unsafe_offset=row * self.stride + column] = value

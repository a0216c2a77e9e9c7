#!/bin/bash
# Run tests under Linux on an emulated Xeon with AMX, for machines without; docs/internals/kernels.md says what ran so.
#
#   bash tools/amx/emulate.sh BOCHS KERNEL WORK PYTEST_ARGUMENT...
#
# BOCHS is the emulator's source folder, patched and built at the first run; KERNEL the folder of an unpacked package of Linux 5.16
# or newer (boot/vmlinuz-*, lib/modules/*); WORK a folder with 8 GB of room. The tests run with the `python` of the path, whose
# files are copied with the compiled kernels, so run them here first. KERNEL_OPTIONS="clearcpuid=amx_tile" takes the tiles away.
# Needs g++, make, patch, busybox (static), cpio, kmod, e2fsprogs, xorriso, isolinux and syslinux-common.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,9p' "$0"; exit 2; }
HERE=$(realpath "$(dirname "$0")") REPO=$(realpath "$(dirname "$0")/../..")
BOCHS=$(realpath "$1") KERNEL=$(realpath "$2") WORK=$(realpath "$3")
shift 3
VERSION=$(ls "$KERNEL/lib/modules")
PYTHON=$(command -v python)

build_emulator() {
    patch -d "$BOCHS" -p1 -f < "$HERE/bochs.patch"
    cd "$BOCHS"
    CFLAGS=-O3 CXXFLAGS="-O3 -fno-strict-aliasing" ./configure --enable-x86-64 --enable-avx --enable-evex --enable-amx \
        --enable-all-optimizations --enable-long-phy-address --disable-debugger --disable-docbook --with-nogui
    make -j "$(nproc)"
}

# The files that tests use, at the same places.
make_disk() {
    local prefixes
    prefixes=$("$PYTHON" -c 'import sys; from engine.system.cache_folder import cache_folder as cache
print(sys.prefix, sys.base_prefix, cache())')
    mkdir "$WORK/files"
    # shellcheck disable=SC2086
    find /bin /lib /lib64 /etc /usr/bin /usr/lib64 /usr/lib/gcc /usr/lib/x86_64-linux-gnu $prefixes \
        \( -name triton -o -name playwright -o -name kubernetes_validate \) -prune -o \( -type f -o -type l \) -print |
        sed 's|^/||' | (cd / && cpio -pdml --quiet "$WORK/files")
    mkdir -p "$WORK"/files/{proc,sys,dev,tmp}
    mkfs.ext4 -q -O ^has_journal -m 0 -d "$WORK/files" "$WORK/disk" "$(($(du -sm "$WORK/files" | cut -f1) * 5 / 4))M"
    rm -r "$WORK/files"
}

# A CD that starts Linux with what reads the disk, this repository, and the tests to run.
make_cd() {
    local system=$WORK/system cd=$WORK/cd module
    rm -rf "$system" "$cd"
    mkdir -p "$system"/{bin,modules,proc,sys,dev,root} "$system/repo" "$cd/isolinux"
    cp "$(command -v busybox)" "$system/bin/busybox"
    for module in sd_mod crc32c_generic ext4 ata_piix; do # last, so that no loading disturbs its start
        modprobe -d "$KERNEL" -S "$VERSION" --show-depends "$module"
    done | awk '$1 == "insmod" && !/pclmul|crc32c-intel/ && !seen[$2]++ {print $2}' | cat -n | while read -r number module; do
        cp "$module" "$system/modules/$((100 + number))-$(basename "$module")"
    done
    (cd "$REPO" && git ls-files -co --exclude-standard | cpio -pdm --quiet "$system/repo")
    printf 'export HOME=%q PYTHONPATH=%q OMP_NUM_THREADS=1 PATH=/usr/bin:/bin LANG=C.UTF-8\ncd %q\ngrep -m1 -o "amx_.*" /proc/cpuinfo\n' \
        "$HOME" "$REPO" "$REPO" > "$system/tests"
    printf '%q -m pytest -v --color=no -p no:cacheprovider%s\necho "pytest: $?"\n' "$PYTHON" "$(printf ' %q' "$@")" >> "$system/tests"
    cat > "$system/init" << END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
for module in /modules/*; do insmod \$module; done
until [ -b /dev/sda ]; do sleep 1; done
mount -t ext4 -o noatime /dev/sda /root
for each in proc sys dev; do mount -o bind /\$each /root/\$each; done
mount -t tmpfs tmp /root/tmp; mkdir -p /root$REPO; cp -a /repo/. /root$REPO/; cp /tests /root/tmp/
chroot /root /bin/bash /tmp/tests 2>&1
poweroff -f
END
    chmod +x "$system/init"
    (cd "$system" && find . | cpio -o -H newc --quiet) > "$cd/system"
    cp "$KERNEL"/boot/vmlinuz-* "$cd/linux"
    cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$cd/isolinux/"
    # Without "fast strings" Linux must not hear of short ones either; five levels of pages and PCID only cost time.
    printf 'default tests\nlabel tests\nkernel /linux\nappend initrd=/system console=ttyS0 nokaslr mitigations=off tsc=reliable no5lvl nopcid clearcpuid=fsrm %s\n' \
        "${KERNEL_OPTIONS:-}" > "$cd/isolinux/isolinux.cfg"
    xorriso -as mkisofs -quiet -o "$WORK/iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 \
        -boot-info-table "$cd"
}

emulate() {
    cat > "$WORK/bochsrc" << END
config_interface: textconfig
display_library: nogui
memory: guest=3072, host=3072
romimage: file=$BOCHS/bios/BIOS-bochs-latest
vgaromimage: file=$BOCHS/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
boot: cdrom
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata0-master: type=disk, path="$WORK/disk", mode=volatile
ata1-master: type=cdrom, path="$WORK/iso", status=inserted
com1: enabled=1, mode=file, dev=$WORK/serial
cpu: model=sapphire_rapids, ips=80000000, reset_on_triple_fault=0, ignore_bad_msrs=1
clock: sync=none, time0=local
log: $WORK/log
panic: action=fatal
END
    rm -f "$WORK/serial"
    BXSHARE=$BOCHS/bios "$BOCHS/bochs" -q -f "$WORK/bochsrc" > "$WORK/out" 2>&1 < /dev/null || true
    cat "$WORK/serial"
    grep -q 'pytest: 0' "$WORK/serial"
}

[ -f "$BOCHS/bochs" ] || (build_emulator)
[ -e "$WORK/disk" ] || make_disk
make_cd "$@"
emulate

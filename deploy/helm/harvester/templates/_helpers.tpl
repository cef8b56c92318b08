{{- define "harvester.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 58 | trimSuffix "-" -}}
{{- end -}}

{{- define "harvester.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 49 | trimSuffix "-" -}}
{{- else if contains (include "harvester.name" .) .Release.Name -}}
{{- .Release.Name | trunc 49 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "harvester.name" .) | trunc 49 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "harvester.selector" -}}
app.kubernetes.io/name: {{ include "harvester.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "harvester.labels" -}}
{{ include "harvester.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "harvester.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "harvester.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "harvester.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The name of the job changes with what it does: a job cannot be changed. */}}
{{- define "harvester.initName" -}}
{{- $made := list (include "harvester.image" .) .Values.config .Values.init.dataSource .Values.init.arguments .Values.init.environment .Values.secrets .Values.set .Values.extraEnvironment | toJson | sha256sum | trunc 8 -}}
{{- printf "%s-init-%s" (include "harvester.fullname" .) $made -}}
{{- end -}}

{{- define "harvester.variables" -}}
{{- range . }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key | quote }}
{{- end }}
{{- end -}}

{{/* What nobody in the pod may do. */}}
{{- define "harvester.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "harvester.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "harvester.mounts" -}}
- name: config
  mountPath: /etc/harvester/harvester.toml
  subPath: harvester.toml
  readOnly: true
- name: run
  mountPath: /run/harvester
{{- range $number, $file := .Values.secrets.files }}
- name: secret-{{ $number }}
  mountPath: {{ $file.path }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "harvester.volumes" -}}
- name: run
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
{{- range $number, $file := .Values.secrets.files }}
- name: secret-{{ $number }}
  secret:
    secretName: {{ $file.secret }}
    defaultMode: 0440
{{- end }}
{{- end -}}
